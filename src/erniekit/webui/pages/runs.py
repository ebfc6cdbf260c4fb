"""The Runs tab: every job of this page with its state, one of them opened, several compared. Put together by app.py."""

from __future__ import annotations

import time
from html import escape
from typing import Any

import gradio as gr

from erniekit.errors import ErnieKitError
from erniekit.track.units import duration, short
from erniekit.webui.charts import compare_charts, empty
from erniekit.webui.pages.job_monitor import CURVES, JobMonitor, pill
from erniekit.webui.pages.page_context import PageContext, notice
from erniekit.webui.runs import RunRow
from erniekit.webui.translations import translate

EVERY_S = 3.0
WORDS = ("train", "eval", "export", "split", "server")
COLUMNS = ("run", "state", "command", "model", "step", "loss", "eval_loss", "speed", "time", "output")
MOST_COMPARED = 6


class RunsPage:
    def __init__(self, context: PageContext) -> None:
        self.context, labels = context, context.labels
        self.timer = gr.Timer(EVERY_S, active=False)
        self.table = gr.HTML("", elem_id="runs-table")
        self.chosen = labels.make(
            gr.Dropdown,
            {"label": "runs.choose", "info": "runs.choose.info"},
            choices=[],
            multiselect=True,
            elem_id="runs-chosen",
        )
        with gr.Row():
            self.compare = labels.make(gr.Button, {"value": "runs.compare"}, elem_id="runs-compare")
            self.again = labels.make(gr.Button, {"value": "runs.again"}, elem_id="runs-again")
            self.delete = labels.make(gr.Button, {"value": "runs.delete"}, elem_id="runs-delete", variant="stop")
        self.compared = gr.HTML("", elem_id="runs-compared")
        self.watch = JobMonitor(context, "runs")
        told: dict[str, Any] = dict(show_progress="hidden", concurrency_limit=None)
        self.shown = [self.table, self.chosen]
        self.timer.tick(self.rows, [context.lang, self.chosen], self.shown, **told)
        context.lang.change(self.rows, [context.lang, self.chosen], self.shown, **told)
        self.chosen.change(self._open, [context.lang, self.chosen], [self.compared, *self.watch.started], **told)
        self.compare.click(self._compare, [context.lang, self.chosen], self.compared, **told)
        self.delete.click(
            self._delete,
            [context.lang, self.chosen],
            [*self.shown, self.compared],
            js="(lang, chosen) => confirm(lang === 'zh' ? '删除所选任务及其目录？' : "
            "'Delete the chosen jobs and their folders?') ? [lang, chosen] : [lang, []]",
            **told,
        )

    def rows(self, lang: str, chosen: list[str]) -> list[Any]:
        rows = self.context.runs.rows(words=WORDS)
        names = [(_name(row, lang), row.id) for row in rows]
        known = {row.id for row in rows}
        kept = [id for id in chosen or [] if id in known]
        choice = gr.update(choices=names) if kept == (chosen or []) else gr.update(choices=names, value=kept)
        return [runs_html(rows, self.context, lang), choice]

    def _open(self, lang: str, chosen: list[str]) -> list[Any]:
        """One chosen: it is watched here. Several: they are there to be compared."""
        if len(chosen or []) != 1:
            return ["", *self.watch.nothing(lang)]
        return ["", *self.watch.tick(lang, chosen[0], ())]

    def _compare(self, lang: str, chosen: list[str]) -> str:
        try:
            ids = [id for id in chosen or [] if self.context.jobs.get(id).word == "train"][:MOST_COMPARED]
            if len(ids) < 2:
                return empty(translate("runs.two", lang))
            runs = {id: self.context.runs.series(id) for id in ids}
            differences = self.context.runs.compare(ids).differences
        except ErnieKitError as error:
            raise notice(error) from None
        titles = {name: translate(f"watch.{name}", lang) for name in (*CURVES, "eval_loss")}
        return compare_charts(runs, titles, translate("watch.waiting", lang)) + _differences(ids, differences, lang)

    def _delete(self, lang: str, chosen: list[str]) -> list[Any]:
        try:
            for id in chosen or []:
                self.context.jobs.delete(id)
        except ErnieKitError as error:
            raise notice(error) from None
        return [*self.rows(lang, chosen), ""]


def _name(row: RunRow, lang: str) -> str:
    return f"{row.id} · {row.stage or row.word} · {row.model} · {translate(f'state.{row.state}', lang)}"


def runs_html(rows: list[RunRow], context: PageContext, lang: str) -> str:
    if not rows:
        return empty(translate("runs.none", lang))
    head = "".join(f"<th>{escape(translate(f'runs.column.{name}', lang))}</th>" for name in COLUMNS)
    body = "".join(f"<tr>{_cells(row, context, lang)}</tr>" for row in rows)
    return (
        f'<div class="ek-scroll"><table class="ek-table"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cells(row: RunRow, context: PageContext, lang: str) -> str:
    started = time.strftime("%m-%d %H:%M:%S", time.localtime(row.created))
    step = f"{row.step:,}" + (f" / {row.total_steps:,}" if row.total_steps else "") if row.word == "train" else ""
    cells = (
        ("brief", f"<code>{escape(row.id)}</code><br>{escape(started)}"),
        ("brief", pill(row.state, translate(f"state.{row.state}", lang))),
        ("brief", escape(f"{row.word} {row.stage}".strip())),
        ("", escape(row.model)),
        ("number", escape(step)),
        ("number", _number(row, row.loss)),
        ("number", _number(row, row.eval_loss)),
        ("number", "" if row.word != "train" or row.tokens_per_second is None else short(row.tokens_per_second)),
        ("number", duration(row.seconds)),
        ("", f"<code>{escape(context.shown(row.output_dir))}</code>" if row.output_dir else ""),
    )
    return "".join(f'<td class="{kind}">{text}</td>' for kind, text in cells)


def _number(row: RunRow, value: float | None) -> str:
    """Of trainings: another job in the same folder did not make its numbers."""
    return "" if row.word != "train" or value is None else f"{value:.4f}"


def _differences(ids: list[str], differences: dict[str, dict[str, Any]], lang: str) -> str:
    rows = {key: values for key, values in differences.items() if key != "output_dir"}
    if not rows:
        return empty(translate("runs.same", lang))
    head = "".join(f"<th>{escape(id)}</th>" for id in ids)
    body = "".join(
        f"<tr><td><code>{escape(key)}</code></td>"
        + "".join(f"<td>{escape(str(values.get(id, '')))}</td>" for id in ids)
        + "</tr>"
        for key, values in rows.items()
    )
    title = f'<div class="ek-title">{escape(translate("runs.differences", lang))}</div>'
    return (
        f'{title}<div class="ek-scroll"><table class="ek-table"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
