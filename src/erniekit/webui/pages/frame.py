"""Frame: the head of the page with the language switch, and what ties the tabs together. Put together by app.py."""

from __future__ import annotations

import secrets
from html import escape
from typing import Any

import gradio as gr

from erniekit.errors import ErnieKitError
from erniekit.webui.forms import from_yaml
from erniekit.webui.pages.page_context import PageContext, notice
from erniekit.webui.translations import LANGUAGES

KEPT = "erniekit"  # the browser's own drawer; what lies in it is no secret


class Frame:
    def __init__(self, context: PageContext, version: str) -> None:
        self.context = context
        context.who = gr.BrowserState("", storage_key=f"{KEPT}-who", secret=KEPT)
        self.kept = gr.BrowserState("", storage_key=f"{KEPT}-lang", secret=KEPT)
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
        context.lang.input(lambda chosen: chosen, context.lang, self.kept, show_progress="hidden")

        def opened(who: str, kept: str, request: gr.Request) -> tuple[str, str]:
            asked = (
                str(request.query_params.get("lang", "")) or kept or (_browsers(request) if lang == "auto" else lang)
            )
            return who or secrets.token_hex(4), asked if asked in LANGUAGES else context.labels.lang

        page.load(opened, [context.who, self.kept], [context.who, context.lang], show_progress="hidden")

    def tabs(self, tabs: Any, named: dict[str, Any], runs: Any, train: Any) -> None:
        """The list of runs is asked for while it is looked at; a run's recipe may go back into the form."""
        context = self.context
        named["runs"].select(
            lambda lang, chosen: [*runs.rows(lang, chosen), gr.Timer(active=True)],
            [context.lang, runs.chosen],
            [*runs.shown, runs.timer],
            show_progress="hidden",
        )
        for name, tab in named.items():
            if name != "runs":
                tab.select(lambda: gr.Timer(active=False), None, runs.timer, show_progress="hidden")

        def again(chosen: list[str]) -> list[Any]:
            try:
                jobs = [job for id in chosen or [] if (job := context.jobs.get(id)).word == "train"]
                if len(jobs) != 1:
                    return [gr.skip()] * (1 + len(train.form_outputs))
                values = from_yaml(jobs[0].recipe.read_text(encoding="utf-8"))
            except ErnieKitError as error:
                raise notice(error) from None
            values.pop("output_dir", None)
            return [gr.update(selected="train"), *train.filled(values)]

        runs.again.click(again, runs.chosen, [tabs, *train.form_outputs], show_progress="hidden")


def _browsers(request: gr.Request) -> str:
    first = str(request.headers.get("accept-language", "")).split(",")[0]
    return "zh" if first.lower().startswith("zh") else "en"
