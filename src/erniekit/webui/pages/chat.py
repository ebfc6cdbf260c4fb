"""The Chat tab: load a model as a server of this machine, talk to it, see it think. Put together by app.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from erniekit.errors import ErnieKitError
from erniekit.webui.charts import empty
from erniekit.webui.chat_client import list_models, stream_chat
from erniekit.webui.chat_pictures import message as user_turn
from erniekit.webui.chat_pictures import sent, window
from erniekit.webui.forms import form
from erniekit.webui.jobs import WebJob
from erniekit.webui.pages.fields import FormFields, recipe
from erniekit.webui.pages.job_monitor import pill
from erniekit.webui.pages.page_context import PageContext, notice, problems_html
from erniekit.webui.run_folders import kind_of
from erniekit.webui.translations import translate

ROWS = (
    ("model_name_or_path",),
    ("lora_path",),
    ("compute_type", "device"),
    ("max_model_len", "engine"),
    ("override_base",),
)
SAMPLING = (("temperature", "top_p"), ("max_new_tokens", "repetition_penalty"), ("enable_thinking",))
EVERY_S, LOADED_S = 1.0, 5.0  # between two looks at the server: while it loads, and after
DRAWN_S = 0.06  # between two pictures of a growing answer
LOG_LINES = 12  # of a server that did not start
History = list[dict[str, Any]]


class ChatPage:
    def __init__(self, context: PageContext) -> None:
        self.context = context
        self.form = form("chat")
        self.fields = FormFields("chat", context, ("model_name_or_path", "lora_path"))
        self.job, self.timer = gr.State(""), gr.Timer(EVERY_S, active=False)
        # What was said is kept here and never taken from the window: a history sent by a client may name files and
        # components that gradio would open.
        self.said = gr.State([])
        with gr.Row(equal_height=False):
            with gr.Column(scale=4, min_width=320):
                self._model_side()
            with gr.Column(scale=8, min_width=420):
                self._talk_side()
        self._wire()

    def _model_side(self) -> None:
        labels = self.context.labels
        with gr.Group():
            self._rows(ROWS)
        with gr.Row():
            self.load = labels.make(
                gr.Button, {"value": "chat.load"}, variant="primary", min_width=100, elem_id="chat-load"
            )
            self.unload = labels.make(
                gr.Button, {"value": "chat.unload"}, min_width=100, interactive=False, elem_id="chat-unload"
            )
        self.status = gr.HTML(empty(translate("chat.not_loaded", labels.lang)), elem_id="chat-status")
        self.speaker = labels.make(
            gr.Radio, {"label": "chat.speaker", "info": "chat.speaker.info"}, choices=[], visible=False,
            interactive=True, elem_id="chat-speaker",
        )  # fmt: skip
        with labels.make(gr.Accordion, {"label": "chat.sampling"}, open=False):
            self.asked = FormFields("chat", self.context)  # of each question, not of the server
            with gr.Group():
                for row in SAMPLING:
                    with gr.Row():
                        for key in row:
                            self.asked.add(self.form.field(key))
            self.system = labels.make(gr.Textbox, {"label": "chat.system"}, lines=2, elem_id="chat-system")

    def _rows(self, rows: tuple[tuple[str, ...], ...]) -> None:
        for row in rows:
            with gr.Row():
                for key in row:
                    self.fields.add(self.form.field(key))

    def _talk_side(self) -> None:
        labels = self.context.labels
        self.window = labels.make(
            gr.Chatbot,
            {"placeholder": "chat.empty"},
            height=520,
            show_label=False,
            layout="bubble",
            buttons=["copy"],
            feedback_options=None,
            elem_id="chat-window",
        )
        self.message = labels.make(
            gr.Textbox,
            {"placeholder": "chat.message"},
            show_label=False,
            container=False,
            max_lines=6,
            elem_id="chat-message",
        )
        self.attached = gr.HTML("", elem_id="chat-attached")
        with gr.Row():
            self.send = labels.make(
                gr.Button, {"value": "chat.send"}, variant="primary", elem_id="chat-send", min_width=90
            )
            self.pictures = labels.make(
                gr.UploadButton,
                {"label": "chat.pictures"},
                file_count="multiple",
                file_types=["image", "video"],
                elem_id="chat-pictures",
                min_width=120,
            )
            self.halt = labels.make(gr.Button, {"value": "chat.stop"}, elem_id="chat-stop", min_width=90)
            self.clear = labels.make(gr.Button, {"value": "chat.clear"}, elem_id="chat-clear", min_width=90)

    def _wire(self) -> None:
        context = self.context
        told: dict[str, Any] = dict(show_progress="hidden", concurrency_limit=None)
        self.state = [self.job, self.timer, self.status, self.unload, self.speaker]
        self.load_inputs = [context.lang, context.who, self.job, *self.fields.components]
        self.load.click(self.load_model, self.load_inputs, self.state, **told)
        self.unload.click(self._unload, [context.lang, self.job], self.state, **told)
        seen = [context.lang, self.job, self.speaker]
        self.timer.tick(self._look, seen, self.state, **told)
        context.lang.change(self._look, seen, self.state, **told)
        adapters, model = self.fields.component("lora_path"), self.fields.component("model_name_or_path")
        adapters.input(self._base_of, [adapters, model], model, show_progress="hidden")
        asked = [self.message, self.pictures, self.said, self.system]
        inputs = [context.lang, self.job, self.speaker, *asked, *self.asked.components]
        outputs = [self.window, self.said, self.message, self.pictures, self.attached]
        self.pictures.upload(_attached, self.pictures, self.attached, show_progress="hidden")
        asking = [
            trigger(self._say, inputs, outputs, show_progress="hidden", concurrency_limit=16)
            for trigger in (self.send.click, self.message.submit)
        ]
        self.halt.click(None, None, None, cancels=asking)
        for clear in (self.clear.click, self.window.clear):
            clear(lambda: ([], [], "", None, ""), None, outputs, cancels=asking, show_progress="hidden")

    def on_open(self, page: Any) -> None:
        page.load(self._again, [self.context.lang, self.context.who], self.state, show_progress="hidden")
        page.unload(self._left)
        for handler, outputs in self.files():
            page.load(handler, None, outputs, show_progress="hidden")

    def files(self) -> list[tuple[Any, list[Any]]]:
        return [self.fields.files()]

    # ---- the server

    def _base_of(self, adapters: list[str], model: str | None) -> Any:
        """The base that a chosen adapter names, where no model is chosen yet."""
        base = kind_of(self.context.roots.folders[0] / adapters[0]).base if adapters and not model else ""
        return self.context.shown(base) if base else gr.skip()

    def load_model(self, lang: str, who: str, id: str, request: gr.Request, *raw: Any) -> list[Any]:
        text, problems = recipe({**self.fields.values(raw), "port": 0}, "", "chat", self.context)
        if problems:
            raise gr.Error(problems_html(problems, lang), duration=12, print_exception=False)
        try:
            if id:
                self.context.jobs.stop(id)
            job = self.context.jobs.start("server", text, who)
            return self._tick(lang, job.id, _session(request))
        except ErnieKitError as error:
            raise notice(error, lang) from None

    def _unload(self, lang: str, id: str) -> list[Any]:
        if id:
            try:
                self.context.jobs.stop(id)
            except ErnieKitError as error:
                raise notice(error, lang) from None
        return self._none(lang)

    def _again(self, lang: str, who: str, request: gr.Request) -> list[Any]:
        """The server this browser loaded before, if it still runs."""
        mine = [job for job in self.context.jobs.list(who) if job.word == "server" and job.is_running] if who else []
        return self._tick(lang, mine[0].id, _session(request)) if mine else [gr.skip()] * len(self.state)

    def _look(self, lang: str, id: str, speaker: str | None, request: gr.Request) -> list[Any]:
        return self._tick(lang, id, _session(request), speaker)

    def _left(self, request: gr.Request) -> None:
        self.context.leases.leave(_session(request))

    def _none(self, lang: str) -> list[Any]:
        nothing = empty(translate("chat.not_loaded", lang))
        return ["", gr.Timer(active=False), nothing, gr.update(interactive=False), gr.update(visible=False)]

    def _tick(self, lang: str, id: str, session: str, speaker: str | None = None) -> list[Any]:
        if not id:
            return self._none(lang)
        try:
            job = self.context.jobs.get(id)
            url = self.context.jobs.server_url(id)
            names = list_models(url, self.context.jobs.server_key(id)) if url else []
        except ErnieKitError:
            return self._none(lang)
        if job.is_running:
            self.context.leases.hold(id, session)
        known = gr.update(visible=len(names) > 1) if speaker in names else gr.update(
            choices=names, value=names[0] if names else None, visible=len(names) > 1
        )  # fmt: skip
        return [
            id,
            gr.Timer(LOADED_S if url else EVERY_S, active=job.is_running),
            self._status(job, url, lang),
            gr.update(interactive=job.is_running),
            known,
        ]

    def _status(self, job: WebJob, url: str, lang: str) -> str:
        log = self.context.jobs.log_tail(job.id).text.strip().splitlines()
        if why := self.context.leases.why(job.id):
            return empty(translate(f"chat.released.{why}", lang))
        if url:
            head, more = pill("ended", translate("chat.ready", lang)), f"<code>{escape(url)}</code>"
        elif job.is_running:
            head, more = (
                pill("running", translate("chat.loading", lang)),
                f"<span>{escape(log[-1] if log else '')}</span>",
            )
        else:
            head = pill(job.state, translate(f"state.{job.state}", lang))
            more = f'<pre class="ek-report bad">{escape(chr(10).join(log[-LOG_LINES:]))}</pre>'
        return f'<div class="ek-status" data-ready="{int(bool(url))}"><div class="ek-line">{head}{more}</div></div>'

    # ---- the conversation

    def _say(
        self,
        lang: str,
        id: str,
        speaker: str | None,
        message: str,
        files: list[str] | None,
        history: History,
        system: str,
        *raw: Any,
    ) -> Iterator[tuple[Any, ...]]:
        message = (message or "").strip()
        if not message and not files:
            yield (gr.skip(),) * 5
            return
        url = self.context.jobs.server_url(id) if id else ""
        if not url:
            raise gr.Error(translate("chat.not_loaded", lang), print_exception=False)
        key = self.context.jobs.server_key(id)
        self.context.leases.use(id)
        told = [*({"role": "system", "content": system.strip()} for _ in [0] if (system or "").strip())]
        try:
            history = [*history, user_turn(message, files or [])]
            told += _plain(history)
        except ErnieKitError as error:
            raise notice(error, lang) from None
        yield window(history), history, "", None, ""
        try:
            for thought, answer in _growing(stream_chat(url, told, key, **self._options(speaker, raw))):
                now = [*history, *_turn(thought, answer, translate("chat.thinking", lang))]
                yield window(now), now, gr.skip(), gr.skip(), gr.skip()
            self.context.leases.use(id)
        except ErnieKitError as error:
            raise notice(error, lang) from None

    def _options(self, speaker: str | None, raw: tuple[Any, ...]) -> dict[str, Any]:
        values = self.asked.values(raw)
        return {
            "model": speaker or "default",
            "max_tokens": int(values.get("max_new_tokens", 1024)),
            "temperature": float(values.get("temperature", 0.95)),
            "top_p": float(values.get("top_p", 0.7)),
            "repetition_penalty": float(values.get("repetition_penalty", 1.0)),
            "enable_thinking": bool(values.get("enable_thinking", False)),
        }


def _session(request: gr.Request) -> str:
    return str(request.session_hash or "")


def _attached(files: list[str] | None) -> str:
    """The names of the files that go with the next message."""
    names = "".join(f"<code>{escape(Path(file).name)}</code>" for file in files or [])
    return f'<div class="ek-line">{names}</div>' if names else ""


def _growing(parts: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Thought and answer so far, no more often than eyes see; the last of them always."""
    said = {"thought": "", "answer": ""}
    drawn = 0.0
    for kind, text in parts:
        said[kind] += text
        if time.monotonic() - drawn >= DRAWN_S:
            drawn = time.monotonic()
            yield said["thought"], said["answer"]
    yield said["thought"], said["answer"]


def _turn(thought: str, answer: str, title: str) -> History:
    out: History = []
    if thought:
        state = "done" if answer else "pending"
        out.append({"role": "assistant", "content": thought, "metadata": {"title": title, "status": state}})
    if answer or not thought:
        out.append({"role": "assistant", "content": answer})
    return out


def _plain(history: History) -> list[dict[str, Any]]:
    """What was said, without thoughts: as plain text by role, with what was shown."""
    out = []
    for turn in history:
        if (turn.get("metadata") or {}).get("title"):
            continue
        content = turn["content"]
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
        out.append(sent({**turn, "content": content}))
    return out
