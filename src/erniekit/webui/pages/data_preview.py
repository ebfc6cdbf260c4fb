"""Data preview: rows of the training file as the model will see them, the trained tokens marked. In the Train tab."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from erniekit.webui.form_pages import STAGES
from erniekit.webui.forms import FormProblem
from erniekit.webui.pages.page_context import PageContext, problems_html
from erniekit.webui.preview import Preview, PreviewMedium, PreviewRow, preview
from erniekit.webui.translations import translate

ROWS = 10  # on a page
_THUMBNAIL = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/=]+")
_THOUGHT = re.compile(r"&lt;think&gt;(.*?)&lt;/think&gt;", re.DOTALL)


class DataPreview:
    def __init__(self, context: PageContext) -> None:
        self.context, labels = context, context.labels
        self.query = gr.State({})  # what the rows were read with, so that the next ones are of the same file
        self.start_row = gr.State(0)
        self.rows = labels.empty("data.none", elem_id="train-data")
        with gr.Row(visible=False) as self.paging:
            self.previous = labels.make(gr.Button, {"value": "data.previous"}, size="sm", elem_id="train-data-before")
            self.next = labels.make(gr.Button, {"value": "data.next"}, size="sm", elem_id="train-data-after")
        self.outputs = [self.query, self.start_row, self.rows, self.paging, self.previous, self.next]
        for button, step in ((self.previous, -ROWS), (self.next, ROWS)):
            button.click(
                self._page_turner(step),
                [context.lang, self.query, self.start_row],
                self.outputs,
                show_progress="minimal",
            )

    def shown(self, values: Mapping[str, Any], stage: str, lang: str, start: int = 0) -> list[Any]:
        preview_data = preview(values, self.context.roots, STAGES[stage], start, ROWS)
        more = preview_data.total > start + len(preview_data.rows)
        return [
            {"values": dict(values), "stage": stage},
            start,
            preview_html(preview_data, start, lang),
            gr.update(visible=bool(start or more)),
            gr.update(interactive=start > 0),
            gr.update(interactive=more),
        ]

    def failed(self, problem: FormProblem, lang: str) -> list[Any]:
        return [{}, 0, problems_html([problem], lang), gr.update(visible=False), gr.skip(), gr.skip()]

    def _page_turner(self, step: int) -> Any:
        def turn(lang: str, query: dict[str, Any], start_row: int) -> list[Any]:
            if not query:
                return [gr.skip()] * len(self.outputs)
            return self.shown(query["values"], query["stage"], lang, max(0, start_row + step))

        return turn


def preview_html(preview_data: Preview, start: int, lang: str) -> str:
    if preview_data.problems:
        return problems_html(list(preview_data.problems), lang)
    if preview_data.error:
        return f'<pre class="ek-report bad">{escape(preview_data.error)}</pre>'
    last = start + len(preview_data.rows)
    count = f"{start + 1}-{last}" + (f" / {preview_data.total:,}" if preview_data.total else "")
    facts = f"{translate('data.rows', lang)} {count}", translate("data.format", lang, name=preview_data.format)
    legend = (
        f'<div class="ek-legend"><span><i class="trained"></i>{escape(translate("data.trained", lang))}</span>'
        f"<span><i></i>{escape(translate('data.not_trained', lang))}</span>"
        + "".join(f"<span>{escape(fact)}</span>" for fact in facts)
        + "</div>"
    )
    return legend + "".join(_row(row, lang) for row in preview_data.rows)


def _row(row: PreviewRow, lang: str) -> str:
    facts = [f"{Path(row.file).name}:{row.line}"]
    if not row.problem:
        facts.append(translate("data.tokens", lang, trained=f"{row.trained:,}", tokens=f"{row.tokens:,}"))
    if row.unused:
        facts.append(translate("data.unused", lang, names=", ".join(row.unused)))
    header = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    media = "".join(_medium(medium, lang) for medium in row.media)
    text = fold_thoughts(row.html, translate("chat.thinking", lang))
    return f'<div class="ek-sample"><header>{header}</header><div class="ek-tokens">{media}{text}</div></div>'


def _medium(medium: PreviewMedium, lang: str) -> str:
    """A picture or video of a row and what it costs, escaped. Nothing but a picture in base64 is put into the page."""
    kind = "data.video" if medium.kind == "video" else "data.picture"
    facts = [f"{translate(kind, lang)} {medium.name}", f"{medium.size[0]} x {medium.size[1]}"]
    facts += [translate("data.frames", lang, count=medium.frames)] if medium.frames > 1 else []
    facts.append(translate("data.media_tokens", lang, count=f"{medium.tokens:,}"))
    image = f'<img src="{medium.thumbnail}" alt="">' if _THUMBNAIL.fullmatch(medium.thumbnail) else ""
    return f'<figure class="ek-medium">{image}<figcaption>{escape(" · ".join(facts))}</figcaption></figure>'


def fold_thoughts(html: str, title: str) -> str:
    """A row's text, already escaped, with what stands between <think> marks folded."""

    def fold(match: re.Match[str]) -> str:
        inside = match[1]
        if not inside.strip() or inside.count("<mark") != inside.count("</mark>"):  # it would be cut in the middle
            return match[0]
        return f'<details class="ek-thought"><summary>{escape(title)}</summary>{inside}</details>'

    return _THOUGHT.sub(fold, html)
