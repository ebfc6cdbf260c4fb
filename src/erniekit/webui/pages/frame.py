"""Frame: the head of the page with the language switch, and what ties the tabs together. Put together by app.py."""

from __future__ import annotations

import secrets
from html import escape
from typing import Any

import gradio as gr

from erniekit.errors import ErnieKitError
from erniekit.webui.pages.page_context import PageContext, notice
from erniekit.webui.translations import LANGUAGES

STORAGE = "erniekit"  # prefix in the browser's local storage; no secrets are in it


class Frame:
    def __init__(self, context: PageContext, version: str) -> None:
        self.context = context
        context.owner = gr.BrowserState("", storage_key=f"{STORAGE}-who", secret=STORAGE)
        self.stored_lang = gr.BrowserState("", storage_key=f"{STORAGE}-lang", secret=STORAGE)
        with gr.Row(elem_id="ek-head"):
            root = context.roots.folders[0]
            name = f'<span title="{escape(str(root))}">{escape(root.name)}</span>'
            gr.HTML(f'<div class="ek-brand"><b>ernie<i>kit</i></b><span>{escape(version)}</span>{name}</div>', scale=1)
            context.lang = gr.Radio(
                [(name, lang) for lang, name in LANGUAGES.items()],
                value=context.labels.lang,
                show_label=False,
                container=False,
                elem_id="ek-lang",
            )

    def wire(self, page: Any, lang: str) -> None:
        """After the tabs are made: their labels are known."""
        context = self.context
        labels = context.labels
        context.lang.change(
            labels.updates, context.lang, labels.components, show_progress="hidden", concurrency_limit=None
        )
        context.lang.input(lambda chosen: chosen, context.lang, self.stored_lang, show_progress="hidden")

        def opened(owner: str, stored_lang: str, request: gr.Request) -> tuple[str, str]:
            requested = (
                str(request.query_params.get("lang", ""))
                or stored_lang
                or (_browser_lang(request) if lang == "auto" else lang)
            )
            return owner or secrets.token_hex(4), requested if requested in LANGUAGES else context.labels.lang

        page.load(opened, [context.owner, self.stored_lang], [context.owner, context.lang], show_progress="hidden")

    def tabs(self, tabs: Any, tab_items: dict[str, Any], pages: dict[str, Any]) -> None:
        """The list of runs is polled while its tab is shown; actions on a run may open another tab."""
        context, runs = self.context, pages["runs"]
        event_options: dict[str, Any] = dict(show_progress="hidden", concurrency_limit=None)
        tab_items["runs"].select(
            lambda *inputs: [*runs.rows(*inputs), gr.Timer(active=True)],
            [context.lang, runs.chosen, runs.monitor.job, runs.last_table],
            [*runs.shown, runs.timer],
            show_progress="hidden",
        )
        for name, tab in tab_items.items():
            if name != "runs":
                tab.select(lambda: gr.Timer(active=False), None, runs.timer, show_progress="hidden")

        train, chat, export = pages["train"], pages["chat"], pages["export"]

        def reuse(lang: str, id: str) -> list[Any]:
            try:
                values = context.runs.recipe(id)
                values.pop("output_dir", None)
                return [gr.update(selected="train"), *train.filled(values)]
            except ErnieKitError as error:
                raise notice(error, lang) from None

        def chat_with(lang: str, event: gr.EventData) -> list[Any]:
            values = self._result_values(lang, str(event.run), ("compute_type", "device"))
            return [gr.update(selected="chat"), *chat.fields.updates(values)]

        def merge(lang: str, event: gr.EventData) -> list[Any]:
            values = self._result_values(lang, str(event.run), ())
            values = {"output_dir": values["lora_path"][0], "model_name_or_path": values["model_name_or_path"]}
            return [gr.update(selected="export"), gr.update(selected="merge"), *export.merge.fields.updates(values)]

        runs.reuse.click(reuse, [context.lang, runs.monitor.job], [tabs, *train.form_outputs], **event_options)
        runs.table.submit(chat_with, context.lang, [tabs, *chat.fields.components], **event_options).success(
            chat.load_model, chat.load_inputs, chat.state, **event_options
        )
        runs.table.apply(merge, context.lang, [tabs, export.kinds, *export.merge.fields.components], **event_options)

    def _result_values(self, lang: str, id: str, keys: tuple[str, ...]) -> dict[str, Any]:
        """A run's result as a model, or as adapters and the base they name, with some keys of its recipe."""
        runs = self.context.runs
        try:
            row, recipe = runs.row(id), runs.recipe(id)
        except ErnieKitError as error:
            raise notice(error, lang) from None
        values = {key: recipe[key] for key in keys if key in recipe}
        folder = self.context.shown(row.output_dir)
        if not row.kind.adapter:
            return {**values, "model_name_or_path": folder}
        base = self.context.shown(row.kind.base) if row.kind.base else recipe.get("model_name_or_path")
        return {**values, "model_name_or_path": base, "lora_path": [folder]}


def _browser_lang(request: gr.Request) -> str:
    first = str(request.headers.get("accept-language", "")).split(",")[0]
    return "zh" if first.lower().startswith("zh") else "en"
