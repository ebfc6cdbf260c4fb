"""The Chat tab: load a model as a server of this machine, chat with it, see its reasoning. Put together by app.py."""

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
from erniekit.webui.chat_pictures import as_displayed, as_request
from erniekit.webui.chat_pictures import message as user_turn
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
LOADING_POLL_S, LOADED_POLL_S = 1.0, 5.0  # between two checks of the server: while it loads, and after
REDRAW_S = 0.06  # between two updates of an answer that is streamed
LOG_LINES = 12  # of a server that did not start
History = list[dict[str, Any]]


class ChatPage:
    def __init__(self, context: PageContext) -> None:
        self.context = context
        self.form = form("chat")
        self.fields = FormFields("chat", context, ("model_name_or_path", "lora_path"))
        self.job, self.timer = gr.State(""), gr.Timer(LOADING_POLL_S, active=False)
        # The conversation is stored here and never taken from the window: a history sent by a client may name files
        # and components that gradio would open.
        self.history = gr.State([])
        with gr.Row(equal_height=False):
            with gr.Column(scale=4, min_width=320):
                self._model_side()
            with gr.Column(scale=8, min_width=420):
                self._chat_side()
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
        self.model_choice = labels.make(
            gr.Radio, {"label": "chat.model", "info": "chat.model.info"}, choices=[], visible=False,
            interactive=True, elem_id="chat-model",
        )  # fmt: skip
        with labels.make(gr.Accordion, {"label": "chat.sampling"}, open=False):
            self.sampling = FormFields("chat", self.context)  # of each question, not of the server
            with gr.Group():
                for row in SAMPLING:
                    with gr.Row():
                        for key in row:
                            self.sampling.add(self.form.field(key))
            self.system = labels.make(gr.Textbox, {"label": "chat.system"}, lines=2, elem_id="chat-system")

    def _rows(self, rows: tuple[tuple[str, ...], ...]) -> None:
        for row in rows:
            with gr.Row():
                for key in row:
                    self.fields.add(self.form.field(key))

    def _chat_side(self) -> None:
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
            self.stop = labels.make(gr.Button, {"value": "chat.stop"}, elem_id="chat-stop", min_width=90)
            self.clear = labels.make(gr.Button, {"value": "chat.clear"}, elem_id="chat-clear", min_width=90)

    def _wire(self) -> None:
        context = self.context
        event_options: dict[str, Any] = dict(show_progress="hidden", concurrency_limit=None)
        self.state = [self.job, self.timer, self.status, self.unload, self.model_choice]
        self.load_inputs = [context.lang, context.owner, self.job, *self.fields.components]
        self.load.click(self.load_model, self.load_inputs, self.state, **event_options)
        self.unload.click(self._unload, [context.lang, self.job], self.state, **event_options)
        poll_inputs = [context.lang, self.job, self.model_choice]
        self.timer.tick(self._poll, poll_inputs, self.state, **event_options)
        context.lang.change(self._poll, poll_inputs, self.state, **event_options)
        adapters, model = self.fields.component("lora_path"), self.fields.component("model_name_or_path")
        adapters.input(self._base_of, [adapters, model], model, show_progress="hidden")
        message_inputs = [self.message, self.pictures, self.history, self.system]
        inputs = [context.lang, self.job, self.model_choice, *message_inputs, *self.sampling.components]
        outputs = [self.window, self.history, self.message, self.pictures, self.attached]
        self.pictures.upload(_attached, self.pictures, self.attached, show_progress="hidden")
        asking = [
            trigger(self._send, inputs, outputs, show_progress="hidden", concurrency_limit=16)
            for trigger in (self.send.click, self.message.submit)
        ]
        self.stop.click(None, None, None, cancels=asking)
        for clear in (self.clear.click, self.window.clear):
            clear(lambda: ([], [], "", None, ""), None, outputs, cancels=asking, show_progress="hidden")

    def on_open(self, page: Any) -> None:
        page.load(self._restore, [self.context.lang, self.context.owner], self.state, show_progress="hidden")
        page.unload(self._tab_closed)
        for handler, outputs in self.files():
            page.load(handler, None, outputs, show_progress="hidden")

    def files(self) -> list[tuple[Any, list[Any]]]:
        return [self.fields.files()]

    # ---- the server

    def _base_of(self, adapters: list[str], model: str | None) -> Any:
        """The base that a chosen adapter names, where no model is chosen yet."""
        base = kind_of(self.context.roots.folders[0] / adapters[0]).base if adapters and not model else ""
        return self.context.shown(base) if base else gr.skip()

    def load_model(self, lang: str, owner: str, id: str, request: gr.Request, *raw: Any) -> list[Any]:
        text, problems = recipe({**self.fields.values(raw), "port": 0}, "", "chat", self.context)
        if problems:
            raise gr.Error(problems_html(problems, lang, "chat"), duration=12, print_exception=False)
        try:
            if id:
                self.context.jobs.stop(id)
            job = self.context.jobs.start("server", text, owner)
            return self._update(lang, job.id, _session(request))
        except ErnieKitError as error:
            raise notice(error, lang) from None

    def _unload(self, lang: str, id: str) -> list[Any]:
        if id:
            try:
                self.context.jobs.stop(id)
            except ErnieKitError as error:
                raise notice(error, lang) from None
        return self._not_loaded(lang)

    def _restore(self, lang: str, owner: str, request: gr.Request) -> list[Any]:
        """The server this browser loaded before, if it still runs."""
        own = (
            [job for job in self.context.jobs.list(owner) if job.command == "server" and job.is_running]
            if owner
            else []
        )
        return self._update(lang, own[0].id, _session(request)) if own else [gr.skip()] * len(self.state)

    def _poll(self, lang: str, id: str, model_choice: str | None, request: gr.Request) -> list[Any]:
        return self._update(lang, id, _session(request), model_choice)

    def _tab_closed(self, request: gr.Request) -> None:
        self.context.leases.close_tab(_session(request))

    def _not_loaded(self, lang: str) -> list[Any]:
        nothing = empty(translate("chat.not_loaded", lang))
        return ["", gr.Timer(active=False), nothing, gr.update(interactive=False), gr.update(visible=False)]

    def _update(self, lang: str, id: str, session: str, model_choice: str | None = None) -> list[Any]:
        if not id:
            return self._not_loaded(lang)
        try:
            job = self.context.jobs.get(id)
            url = self.context.jobs.server_url(id)
            names = list_models(url, self.context.jobs.server_key(id)) if url else []
        except ErnieKitError:
            return self._not_loaded(lang)
        if job.is_running:
            self.context.leases.hold(id, session)
        choices = gr.update(visible=len(names) > 1) if model_choice in names else gr.update(
            choices=names, value=names[0] if names else None, visible=len(names) > 1
        )  # fmt: skip
        return [
            id,
            gr.Timer(LOADED_POLL_S if url else LOADING_POLL_S, active=job.is_running),
            self._status(job, url, lang),
            gr.update(interactive=job.is_running),
            choices,
        ]

    def _status(self, job: WebJob, url: str, lang: str) -> str:
        log = self.context.jobs.log_tail(job.id).text.strip().splitlines()
        if reason := self.context.leases.release_reason(job.id):
            return empty(translate(f"chat.released.{reason}", lang))
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

    def _send(
        self,
        lang: str,
        id: str,
        model_choice: str | None,
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
        messages = [*({"role": "system", "content": system.strip()} for _ in [0] if (system or "").strip())]
        try:
            history = [*history, user_turn(message, files or [])]
            messages += _request_messages(history)
        except ErnieKitError as error:
            raise notice(error, lang) from None
        yield as_displayed(history), history, "", None, ""
        try:
            for thought, answer in _throttled(stream_chat(url, messages, key, **self._options(model_choice, raw))):
                now = [*history, *_assistant_messages(thought, answer, translate("chat.thinking", lang))]
                yield as_displayed(now), now, gr.skip(), gr.skip(), gr.skip()
            self.context.leases.use(id)
        except ErnieKitError as error:
            raise notice(error, lang) from None

    def _options(self, model_choice: str | None, raw: tuple[Any, ...]) -> dict[str, Any]:
        values = self.sampling.values(raw)
        return {
            "model": model_choice or "default",
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


def _throttled(parts: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Thought and answer so far, at most once per REDRAW_S; the last of them always."""
    text_by_kind = {"thought": "", "answer": ""}
    last_redraw = 0.0
    for kind, text in parts:
        text_by_kind[kind] += text
        if time.monotonic() - last_redraw >= REDRAW_S:
            last_redraw = time.monotonic()
            yield text_by_kind["thought"], text_by_kind["answer"]
    yield text_by_kind["thought"], text_by_kind["answer"]


def _assistant_messages(thought: str, answer: str, title: str) -> History:
    out: History = []
    if thought:
        state = "done" if answer else "pending"
        out.append({"role": "assistant", "content": thought, "metadata": {"title": title, "status": state}})
    if answer or not thought:
        out.append({"role": "assistant", "content": answer})
    return out


def _request_messages(history: History) -> list[dict[str, Any]]:
    """The messages of a request: the conversation as plain text by role with its pictures, without thoughts."""
    out = []
    for turn in history:
        if (turn.get("metadata") or {}).get("title"):
            continue
        content = turn["content"]
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
        out.append(as_request({**turn, "content": content}))
    return out
