"""`erniekit server`: a model folder behind the OpenAI interface, until a signal ends it. Called by cli/commands.py.

The embedded engine runs in this process; the others are programs that engines/launched.py starts and watches.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import os
import platform
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from erniekit.config import RunConfig, load, refuse_not_yet_supported
from erniekit.config.address import is_loopback
from erniekit.config.flat import KEYS
from erniekit.config.opening_line import announce_command
from erniekit.errors import ConfigError
from erniekit.extras import install_command
from erniekit.log import emit, warn
from erniekit.net.address import KEY_VARIABLE, announce
from erniekit.net.hosts import Hosts
from erniekit.net.listen import bind
from erniekit.printable import counted
from erniekit.serve.engines import EMBEDDED
from erniekit.weight_kinds import SERVED

if TYPE_CHECKING:
    from erniekit.serve.loaded_models import LoadedModels
    from erniekit.serve.middleware import Middleware

# Sections of the config, and keys of others, that no server reads.
NOT_READ = {"compile", "max_steps", "num_train_epochs", "batch_size"}
OF_TRAINING = {"checkpoint", "data", "distill", "dpo", "memory", "optim", "score", "tracking", "tuning"}
ENGINE_S = 2.0  # for the engine's thread to end, once it is stopped
SWITCH_S = (
    0.001  # the engine's thread and the event loop's take turns: with Python's 5 ms a step could wait for a stream
)
LEFT_S = 5.0  # beyond drain_timeout, for the last events to be sent


def server_command(args: list[str]) -> int:
    """`erniekit server DIR | RECIPE.yaml [key=value ...]`."""
    cfg = load(args, "server")
    refuse_not_yet_supported(cfg, "server")
    note_unread(cfg)
    key = read_key(cfg)
    check_address(cfg, key)
    check_adapter_folders(cfg)
    announce_command(cfg)
    name = choose_engine(cfg)
    if name != EMBEDDED:
        from erniekit.serve.engines.external import serve_external

        return serve_external(cfg, name, key)
    need_packages()
    return serve_embedded(cfg, key)


def note_unread(cfg: RunConfig) -> None:
    """A recipe holds keys of every command; a key that was typed for this one and changes nothing is worth a line."""
    read = [name for name, key in KEYS.items() if key.section not in OF_TRAINING and name not in NOT_READ] + ["verify"]
    if idle := cfg.typed_besides(read):
        warn(f"without effect on a server: {', '.join(idle)}")


def choose_engine(cfg: RunConfig) -> str:
    """auto is the embedded engine, unless the model must be spread over devices: then whatever is installed."""
    s = cfg.serve
    if s.engine != "auto":
        if s.engine == EMBEDDED and s.server_tp_degree > 1:
            raise ConfigError(
                f"the embedded engine uses one device; {s.server_tp_degree} are requested",
                where="tensor_parallel_degree",
                fix="engine: vllm, sglang or fastdeploy spread a model; or tensor_parallel_degree: 1",
            )
        return s.engine
    if s.server_tp_degree <= 1:
        return EMBEDDED
    from erniekit.serve.engines import EXTERNAL
    from erniekit.serve.engines.external import is_installed

    found = next((name for name in EXTERNAL if is_installed(EXTERNAL.get(name), s.engine_python)), None)
    if found is None:
        raise ConfigError(
            f"no engine here can spread a model over {s.server_tp_degree} devices",
            where="tensor_parallel_degree",
            fix="install vllm, sglang or fastdeploy; or tensor_parallel_degree: 1 for the embedded engine",
        )
    return found


def need_packages(command: str = "erniekit server") -> None:
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the server needs {' and '.join(missing)}", where=command, fix=install_command("serve"))


def read_key(cfg: RunConfig) -> str | None:
    """From a file or the environment, never from the command line, where every user of the machine could read it."""
    path = cfg.serve.api_key_file
    if path is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        key = Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key cannot be read: {error}", where="api_key_file", fix="check the path") from None
    if not key:
        raise ConfigError("the file with the key is empty", where=f"api_key_file: {path}", fix="put a key into it")
    return key


def check_address(cfg: RunConfig, key: str | None) -> None:
    host = cfg.serve.host
    if key is None and not is_loopback(host):
        if not cfg.serve.allow_unauthenticated:
            raise ConfigError(
                f"host {host} would let other machines in, and no key is set",
                where="host",
                fix=f"set {KEY_VARIABLE} or api_key_file, keep host: 127.0.0.1, or set allow_unauthenticated: True",
            )
        warn(f"anyone who reaches {host}:{cfg.serve.port} can use this server: there is no key")


def check_adapter_folders(cfg: RunConfig) -> None:
    """Adapters may come later, the folders may not: a name that is mistyped would refuse every adapter."""
    for folder in cfg.serve.lora_dirs:
        if not Path(folder).expanduser().is_dir():
            raise ConfigError(
                f"lora_dirs names {folder!r}, which is not a folder here",
                where=f"lora_dirs: {cfg.origin('lora_dirs')}",
                fix="check the path, or make the folder first; it may be empty: adapters are loaded later",
            )


def serve_embedded(cfg: RunConfig, key: str | None) -> int:
    from erniekit.serve.loaded_models import find_models, load_models

    if cfg.serve.quantization and cfg.serve.quantization not in SERVED:
        warn(
            f"quantization {cfg.serve.quantization}: a name of another engine; the embedded one has "
            f"{', '.join(SERVED)}, and uses the weights as they are stored"
        )
    entries = find_models(cfg)
    sock = bind(cfg.serve.host, cfg.serve.port)
    try:
        emit(f"loading {entries[0].found.describe()}")
        loaded = load_models(cfg, entries)
        disable_slow_onednn(loaded)
        sys.setswitchinterval(SWITCH_S)
        if cfg.serve.use_warmup or loaded.engine.recorded is not None:  # recording takes seconds, and is no client's
            asyncio.run(warm_up(loaded))
        try:
            return run(cfg, loaded, sock, key)
        finally:
            loaded.engine.stop("the server is stopping", ENGINE_S)
    finally:
        sock.close()


def disable_slow_onednn(loaded: LoadedModels) -> None:
    """On ARM, oneDNN takes fp32 products of 16 rows and more, and needs up to twice the time of torch's own for batches
    as small as ours."""
    import torch

    engine = loaded.engine
    fp32 = next(next(iter(engine.models.values())).parameters()).dtype == torch.float32
    if engine.device.type == "cpu" and fp32 and platform.machine() in ("aarch64", "arm64"):
        torch.backends.mkldnn.set_flags(False)


async def warm_up(loaded: LoadedModels) -> None:
    """One token from each model: what is compiled or cached on first use is then there."""
    from erniekit.serve.engines.base import GenerationJob, SamplingParams

    for served in loaded.models.values():
        job = GenerationJob((served.tokenizer.eos_id,), served.name, SamplingParams(1), frozenset(), served.vocab)
        async for _ in loaded.engine.submit(job):
            pass


def make_application(cfg: RunConfig, loaded: LoadedModels, key: str | None) -> Middleware:
    """The application with the keys of this run as defaults of requests."""
    from erniekit.serve.api import ApiSettings, make_app
    from erniekit.serve.media_turns import MediaSettings
    from erniekit.serve.request_parsing import SamplingDefaults

    s = cfg.serve
    defaults = SamplingDefaults(
        s.max_new_tokens,
        s.min_tokens,
        s.temperature,
        s.top_p,
        s.top_k,
        s.frequency_penalty,
        s.presence_penalty,
        s.repetition_penalty,
        s.enable_thinking if cfg.given("enable_thinking") else None,
    )
    # With a key, no site that a browser shows can request anything: it does not have the key.
    hosts = Hosts.of(s.host, s.server_names)
    media = MediaSettings(cfg.vision.media_num_proc or MediaSettings.processes)
    settings = ApiSettings(
        defaults,
        s.request_timeout,
        key,
        int(time.time()),
        hosts if key is None else None,
        media=media,
        adapters=loaded.adapters,
        details=s.enable_prompt_tokens_details,
    )
    return make_app(loaded.engine, loaded.models, settings)


def run(cfg: RunConfig, loaded: LoadedModels, sock: socket.socket, key: str | None) -> int:
    """Listens until SIGTERM or Ctrl-C; then running answers get drain_timeout to end, and the process a little more."""
    import uvicorn

    from erniekit.net.connections import limited
    from erniekit.serve.shutdown import AGAIN_S, ShutdownDeadline, stopping

    s, application, deadline = cfg.serve, make_application(cfg, loaded, key), ShutdownDeadline()
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            announce(f"http://{shown}:{port}/v1", f"{', '.join(loaded.models)}; {loaded.about}")

        def handle_exit(self, sig: int, frame: Any) -> None:
            if self.should_exit:
                try:
                    asyncio.get_running_loop().call_soon_threadsafe(self._end_now)
                except RuntimeError:  # the loop has ended already
                    self.force_exit = True
            deadline.within(AGAIN_S if self.should_exit else s.drain_timeout + LEFT_S + 1)
            application.draining = True
            if not self.should_exit:
                super().handle_exit(sig, frame)

        def _end_now(self) -> None:
            """Asked twice: waiting clients get an error, and a second to read it."""
            application.app.state.api.end_answers()
            asyncio.get_running_loop().call_later(AGAIN_S / 2, setattr, self, "force_exit", True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            if answers := len(self.server_state.tasks):
                emit(stopping(f"finishing {counted(answers, 'answer')}", s.drain_timeout))
            ending = asyncio.ensure_future(self._end_answers())
            await super().shutdown(sockets)
            deadline.answers_ended = not self.server_state.tasks
            ending.cancel()

        async def _end_answers(self) -> None:
            await asyncio.sleep(s.drain_timeout)
            # Not in asyncio's executor, whose threads are waited for at the end.
            stop = threading.Thread(target=loaded.engine.stop, args=("the server is stopping",), daemon=True)
            stop.start()
            await asyncio.sleep(LEFT_S / 2)
            application.app.state.api.end_answers()  # for requests that a hanging engine does not end

    # uvicorn raises the signal once more when it is done; the answer is the exit code, not a death by signal.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    config, sock = limited(application, sock, lifespan="off", timeout_graceful_shutdown=int(s.drain_timeout + LEFT_S))
    server = Server(config)
    server.run(sockets=[sock])
    deadline.within(ENGINE_S + LEFT_S)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: deadline.within(AGAIN_S))
    emit("stopped")
    deadline.settle()
    atexit.register(_ignore_signals)
    return 0 if deadline.answers_ended else 1


def _ignore_signals() -> None:
    """While Python ends it gives signals back to the system, and the process would die of one: all is stopped, and the
    exit code says how."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
