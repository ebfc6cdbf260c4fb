"""Frame: the head of the page with the language switch, and what ties the tabs together. Put together by app.py."""

from __future__ import annotations

import secrets
from html import escape
from typing import Any

import gradio as gr

from erniekit.errors import ErnieKitError
from erniekit.webui.forms import from_yaml
from erniekit.webui.pages.desk import Desk, notice
from erniekit.webui.words import LANGUAGES

KEPT = "erniekit"  # the browser's own drawer; what lies in it is no secret


class Frame:
    def __init__(self, desk: Desk, version: str) -> None:
        self.desk = desk
        desk.who = gr.BrowserState("", storage_key=f"{KEPT}-who", secret=KEPT)
        self.kept = gr.BrowserState("", storage_key=f"{KEPT}-lang", secret=KEPT)
        with gr.Row(elem_id="ek-head"):
            root = desk.roots.folders[0]
            name = f'<span title="{escape(str(root))}">{escape(root.name)}</span>'
            gr.HTML(f'<div class="ek-brand"><b>ernie<i>kit</i></b><span>{escape(version)}</span>{name}</div>', scale=1)
            desk.lang = gr.Radio(
                [(name, lang) for lang, name in LANGUAGES.items()],
                value=desk.labels.lang,
                show_label=False,
                container=False,
                elem_id="ek-lang",
            )

    def wire(self, page: Any, lang: str) -> None:
        """After the tabs are made: their labels are known."""
        desk = self.desk
        labels = desk.labels
        desk.lang.change(labels.updates, desk.lang, labels.components, show_progress="hidden", concurrency_limit=None)
        desk.lang.input(lambda chosen: chosen, desk.lang, self.kept, show_progress="hidden")

        def opened(who: str, kept: str, request: gr.Request) -> tuple[str, str]:
            asked = (
                str(request.query_params.get("lang", "")) or kept or (_browsers(request) if lang == "auto" else lang)
            )
            return who or secrets.token_hex(4), asked if asked in LANGUAGES else desk.labels.lang

        page.load(opened, [desk.who, self.kept], [desk.who, desk.lang], show_progress="hidden")

    def tabs(self, tabs: Any, named: dict[str, Any], runs: Any, train: Any) -> None:
        """The list of runs is asked for while it is looked at; a run's recipe may go back into the form."""
        desk = self.desk
        named["runs"].select(
            lambda lang, chosen: [*runs.rows(lang, chosen), gr.Timer(active=True)],
            [desk.lang, runs.chosen],
            [*runs.shown, runs.timer],
            show_progress="hidden",
        )
        for name, tab in named.items():
            if name != "runs":
                tab.select(lambda: gr.Timer(active=False), None, runs.timer, show_progress="hidden")

        def again(chosen: list[str]) -> list[Any]:
            try:
                jobs = [job for id in chosen or [] if (job := desk.jobs.get(id)).word == "train"]
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
