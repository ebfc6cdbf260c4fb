"""`erniekit webui`: the page put together, guarded and served. Called by cli/commands.py.

The page starts the same commands a person would type, as processes of their own; it holds no run inside.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile
import warnings
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from erniekit.config.address import is_loopback
from erniekit.config.opening_line import announce_work
from erniekit.errors import ConfigError
from erniekit.extras import install_command
from erniekit.log import emit, paint
from erniekit.net.listen import bind
from erniekit.track.charts import HOVER
from erniekit.webui.chat_leases import ChatLeases
from erniekit.webui.guard import Guard, new_token
from erniekit.webui.jobs import TOKEN_VARIABLE, Jobs
from erniekit.webui.limits import MAX_FILE
from erniekit.webui.paths import Roots
from erniekit.webui.run_folders import RunFolders
from erniekit.webui.runs import Runs
from erniekit.webui.uploads import HOME

if TYPE_CHECKING:
    from erniekit.webui.pages.page_context import PageContext

STATIC = Path(__file__).parent / "static"
MAX_EVENTS = 200  # of all browsers that wait for their turn
USAGE = (
    "erniekit webui [host=ADDRESS] [port=PORT] [root=DIR,DIR] [--runs DIR,DIR] [idle=MINUTES] "
    "[name=HOST,HOST] [lang=en|zh|auto] [--no-token]"
)


@dataclass(frozen=True)
class PageSettings:
    host: str = "127.0.0.1"
    port: int = 7860
    roots: tuple[str, ...] = ()
    lang: str = "auto"  # the browser's
    names: tuple[str, ...] = ()  # further names the machine is reached by
    no_token: bool = False  # on a loopback address: any account of this machine may use the page
    runs: tuple[str, ...] = ()  # further folders with runs: roots too
    idle: float = 30.0  # minutes without a message until a chat model is unloaded; 0 keeps it while its tab is open


def webui_command(args: list[str]) -> int:
    settings = settings_from(args)
    if find_spec("gradio") is None or find_spec("uvicorn") is None:
        raise ConfigError("gradio is not installed", where="erniekit webui", fix=install_command("webui"))
    announce_work("web page")  # gradio takes seconds to import
    listening = bind(settings.host, settings.port)
    settings = replace(settings, port=listening.getsockname()[1])
    token = None if settings.no_token else os.environ.get(TOKEN_VARIABLE) or new_token()
    serve(make_app(settings, token), listening, address(settings, token))
    return 0


def settings_from(args: list[str]) -> PageSettings:
    """key=value or --key value, and --no-token; `root` may hold several folders, and come several times."""
    settings = PageSettings(port=_port(os.environ.get("GRADIO_SERVER_PORT", "7860"), "GRADIO_SERVER_PORT"))
    arguments = list(args)
    while arguments:
        argument = arguments.pop(0)
        if argument == "--no-token":
            settings = replace(settings, no_token=True)
            continue
        name, equals, value = argument.removeprefix("--").partition("=")
        if not equals:
            value = arguments.pop(0) if argument.startswith("--") and arguments else ""
        if not value:
            raise ConfigError(f"webui does not know {argument!r}", where="command line", fix=USAGE)
        if name == "host":
            settings = replace(settings, host=value)
        elif name == "port":
            settings = replace(settings, port=_port(value, "port"))
        elif name == "root":
            settings = replace(settings, roots=(*settings.roots, *(folder for folder in value.split(",") if folder)))
        elif name == "runs":
            settings = replace(settings, runs=(*settings.runs, *(folder for folder in value.split(",") if folder)))
        elif name == "name":
            settings = replace(settings, names=(*settings.names, *value.split(",")))
        elif name == "idle":
            settings = replace(settings, idle=_minutes(value))
        elif name == "lang" and value in ("en", "zh", "auto"):
            settings = replace(settings, lang=value)
        else:
            raise ConfigError(f"webui does not know {argument!r}", where="command line", fix=USAGE)
    if settings.no_token and not is_loopback(settings.host):
        raise ConfigError(
            f"host {settings.host} lets other machines in, and they need a token",
            where="--no-token",
            fix="leave --no-token out, or keep host=127.0.0.1",
        )
    return settings


def _port(text: str, where: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) <= 65535:
        raise ConfigError(f"{text!r} is not a port", where=where, fix="a number from 0 to 65535; 0 takes a free one")
    return int(text)


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e6:
        raise ConfigError(f"idle is {text!r}", where="idle", fix="minutes, e.g. idle=30; 0 keeps models loaded")
    return value


def address(settings: PageSettings, token: str | None) -> str:
    host = socket.gethostname() if settings.host in ("0.0.0.0", "::", "[::]") else settings.host
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"http://{host}:{settings.port}/" + (f"?token={token}" if token else "")


def make_app(settings: PageSettings, token: str | None = None) -> Guard:
    """The whole application: gradio's, behind the guard. Uploads go to a folder of this process alone."""
    uploads = tempfile.mkdtemp(prefix="erniekit-webui-")
    atexit.register(shutil.rmtree, uploads, ignore_errors=True)
    # Read by gradio when it is imported: nothing is reported.
    os.environ.update(GRADIO_ANALYTICS_ENABLED="False", GRADIO_TEMP_DIR=uploads)
    # The script in a chart holds its numbers, and is not meant to run.
    warnings.filterwarnings("ignore", message="A `<script>` tag was found")
    import gradio as gr
    from fastapi import FastAPI

    context = make_context(settings)
    page = build(settings, context)
    context.leases.start()
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    gr.mount_gradio_app(
        app,
        page,
        path="/",
        theme=theme(),
        css=(STATIC / "page.css").read_text(encoding="utf-8"),
        head=f"<script>{HOVER}{(STATIC / 'page.js').read_text(encoding='utf-8')}</script>",
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        enable_monitoring=False,
        show_error=True,
        max_file_size=MAX_FILE,
    )
    check_paths(page)
    guard = Guard(app, settings.host, settings.port, token, files=[uploads], names=settings.names)
    guard.on_close = context.leases.close
    return guard


def check_paths(page: Any) -> None:
    """Gradio's check that files named in requests were uploaded. It is off until `launch`, which a page that is mounted
    into an application never calls: then any file of this user could be named, copied and fetched."""
    if not hasattr(page, "has_launched"):
        raise RuntimeError("this version of gradio has no has_launched: its check of file paths cannot be turned on")
    page.has_launched = True


def make_context(settings: PageSettings) -> PageContext:
    """What the tabs share: jobs, runs, roots, texts, and the leases of loaded chat models."""
    from erniekit.webui.pages.page_context import Labels, PageContext

    roots = Roots(settings.roots)
    for folder in settings.runs:
        roots = roots.with_folder(folder)
    jobs = Jobs(roots.folders[0] / HOME, roots)
    labels = Labels("en" if settings.lang == "auto" else settings.lang)
    leases = ChatLeases(jobs, settings.idle * 60)
    return PageContext(jobs, Runs(jobs, RunFolders(roots.folders)), jobs.roots, labels, leases)


def build(settings: PageSettings, context: PageContext | None = None) -> Any:
    """The page itself, as gradio's Blocks."""
    import gradio as gr

    from erniekit.version import __version__
    from erniekit.webui.pages.chat import ChatPage
    from erniekit.webui.pages.evaluate import EvaluatePage
    from erniekit.webui.pages.export import ExportPage
    from erniekit.webui.pages.frame import Frame
    from erniekit.webui.pages.runs import RunsPage
    from erniekit.webui.pages.train import TrainPage

    context = context or make_context(settings)
    labels = context.labels
    with gr.Blocks(title="erniekit", fill_width=True, analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        frame = Frame(context, __version__)
        kinds = {"train": TrainPage, "runs": RunsPage, "evaluate": EvaluatePage, "chat": ChatPage, "export": ExportPage}
        tab_items: dict[str, Any] = {}
        pages: dict[str, Any] = {}
        with gr.Tabs(selected="train", elem_id="ek-tabs") as tabs:
            for name, kind in kinds.items():
                with labels.make(gr.Tab, {"label": f"tab.{name}"}, id=name) as tab_items[name]:
                    pages[name] = kind(context)
        frame.wire(page, settings.lang)
        frame.tabs(tabs, tab_items, pages)
        for name in ("train", "evaluate", "chat", "export"):
            pages[name].on_open(page)
            for handler, outputs in pages[name].files():
                tab_items[name].select(handler, None, outputs, show_progress="hidden")
    page.queue(max_size=MAX_EVENTS)
    return page


def theme() -> Any:
    """System fonts: nothing is fetched from elsewhere."""
    import gradio as gr

    text = [
        "-apple-system",
        "Segoe UI",
        "Roboto",
        "Arial",
        "PingFang SC",
        "Microsoft YaHei",
        "Noto Sans CJK SC",
        "sans-serif",
    ]
    code = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"]
    base = gr.themes.Base(
        primary_hue=gr.themes.colors.blue,
        neutral_hue=gr.themes.colors.zinc,
        spacing_size="sm",
        radius_size="md",
        text_size="sm",
        font=text,
        font_mono=code,
    )
    return base.set(
        body_background_fill="#f6f6f3",
        body_background_fill_dark="#161618",
        block_background_fill="#ffffff",
        block_background_fill_dark="#1f1f22",
        block_border_width="1px",
        block_label_background_fill="transparent",
        block_title_text_weight="600",
        button_primary_background_fill="#2a78d6",
        button_primary_background_fill_hover="#1f66bd",
        button_primary_text_color="#ffffff",
        button_large_text_size="14px",
        button_large_text_weight="600",
        button_large_padding="8px 14px",
        button_small_text_weight="600",
        button_secondary_background_fill="#ffffff",
        button_secondary_background_fill_dark="#29292c",
        button_secondary_border_color="#d5d4cc",
        button_secondary_border_color_dark="#4a4a4f",
        button_border_width="1px",
        input_background_fill="#fafaf8",
        input_background_fill_dark="#29292c",
        input_border_color="#d5d4cc",
        input_border_color_dark="#4a4a4f",
        input_border_width="1px",
        block_info_text_color="#75736c",
        block_info_text_color_dark="#98968d",
        block_title_text_color="#2d2d30",
        block_title_text_color_dark="#e8e8ea",
    )


def serve(app: Guard, listening: socket.socket, url: str) -> None:
    import uvicorn

    from erniekit.net.connections import limited

    class PageServer(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            emit(f"{paint('ready', 'green', 'bold')}: ", own_address=url)
            emit("Ctrl-C ends the page and unloads its chat models; training runs continue and are found again.")

        async def shutdown(self, sockets: Any = None) -> None:
            await super().shutdown(sockets)
            app.on_close()

    config, listening = limited(app, listening, timeout_graceful_shutdown=2)
    PageServer(config).run(sockets=[listening])
