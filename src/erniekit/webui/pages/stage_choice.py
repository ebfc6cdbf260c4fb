"""Stage choice: what a training learns from, with the rows that its files hold. In the Train tab, above the form."""

from __future__ import annotations

from html import escape
from typing import Any

import gradio as gr

from erniekit.webui.form_pages import ROWS, STAGES
from erniekit.webui.pages.page_context import PageContext
from erniekit.webui.translations import translate

FIRST = "SFT"


class StageChoice:
    def __init__(self, context: PageContext) -> None:
        self.choice = context.labels.make(
            gr.Radio, {"label": "train.stage", "choices": _choices}, value=FIRST, elem_id="train-stage"
        )
        self.hint = gr.HTML(stage_hint(context.labels.lang, FIRST), elem_id="train-stage-hint", elem_classes="ek-hint")
        for component in (self.choice, context.lang):
            component.change(stage_hint, [context.lang, self.choice], self.hint, show_progress="hidden")


def stage_hint(lang: str, stage: str) -> str:
    """What the stage does, and a row that it reads."""
    row = f"<code>{escape(ROWS[stage])}</code>"
    return f"{escape(translate(f'stage.{_key(stage)}.hint', lang))} {escape(translate('stage.row', lang))} {row}"


def _choices(lang: str) -> Any:
    return [(translate(f"stage.{_key(stage)}", lang), stage) for stage in STAGES]


def _key(stage: str) -> str:
    return stage.lower().replace("-", "_")
