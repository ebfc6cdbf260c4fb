"""The Runs tab: runs of this page and of its folders; one opened, several compared. Put together by app.py."""

from __future__ import annotations

from typing import Any

import gradio as gr

from erniekit.errors import ErnieKitError
from erniekit.webui.charts import compare_charts, empty
from erniekit.webui.pages.job_monitor import CURVES, JobMonitor
from erniekit.webui.pages.page_context import PageContext, notice
from erniekit.webui.pages.runs_table import CLICKS, differences_html, run_name, runs_html
from erniekit.webui.translations import translate

POLL_S = 3.0
COMMANDS = ("train", "eval", "export", "split", "server")
MAX_COMPARED = 6
TO_DETAIL = "() => setTimeout(() => document.getElementById('runs-detail')?.scrollIntoView({block: 'nearest'}), 150)"


class RunsPage:
    def __init__(self, context: PageContext) -> None:
        self.context, labels = context, context.labels
        self.timer = gr.Timer(POLL_S, active=False)
        self.chosen, self.last_table = gr.State([]), gr.State("")
        with gr.Row(elem_classes="ek-tools"):
            labels.heading("runs.hint", elem_classes="ek-hint", scale=1)
            self.compare = labels.make(
                gr.Button, {"value": "runs.compare"}, elem_id="runs-compare", size="sm", scale=0, min_width=120
            )
        self.table = gr.HTML("", elem_id="runs-table", js_on_load=CLICKS, apply_default_css=False)
        self.compared = gr.HTML("", elem_id="runs-compared")
        with gr.Column(visible=False, elem_id="runs-detail") as self.detail:
            with gr.Row(equal_height=True, elem_classes="ek-tools"):
                self.name = labels.make(
                    gr.Textbox, {"label": "runs.name"}, elem_id="runs-name", max_lines=1, scale=3, min_width=220
                )
                self.rename = labels.make(gr.Button, {"value": "runs.rename"}, elem_id="runs-rename", min_width=90)
                self.reuse = labels.make(gr.Button, {"value": "runs.again"}, elem_id="runs-again", min_width=150)
                self.delete = labels.make(
                    gr.Button, {"value": "runs.delete"}, elem_id="runs-delete", variant="stop", min_width=90
                )
            self.monitor = JobMonitor(context, "runs")
        self._wire()

    def _wire(self) -> None:
        context = self.context
        event_options: dict[str, Any] = dict(show_progress="hidden", concurrency_limit=None)
        table_inputs = [context.lang, self.chosen, self.monitor.job, self.last_table]
        self.shown = [self.table, self.last_table]
        self.opened = [self.compared, self.detail, self.name, self.delete, *self.monitor.outputs]
        self.timer.tick(self.rows, table_inputs, self.shown, **event_options)
        context.lang.change(self.rows, table_inputs, self.shown, **event_options)
        opening = self.table.select(self._open, context.lang, self.opened, **event_options)
        opening.then(self.rows, table_inputs, self.shown, **event_options).then(None, None, None, js=TO_DETAIL)
        choosing = self.table.input(self._choose, self.chosen, [self.chosen, self.compared], **event_options)
        choosing.then(self.rows, table_inputs, self.shown, **event_options)
        resuming = self.table.retry(self._resume, [context.lang, context.owner], self.opened, **event_options)
        resuming.then(self.rows, table_inputs, self.shown, **event_options)
        comparing = [self.compared, self.detail, *self.monitor.outputs]
        self.compare.click(self._compared, [context.lang, self.chosen], comparing, **event_options)
        gr.on(
            [self.rename.click, self.name.submit],
            self._rename,
            [context.lang, self.monitor.job, self.name],
            self.name,
            **event_options,
        ).then(self.rows, table_inputs, self.shown, **event_options)
        self.delete.click(
            self._delete,
            [context.lang, self.monitor.job],
            self.opened,
            js="(lang, job) => confirm(lang === 'zh' ? '删除此任务及其目录？目录之外的结果会保留。' : "
            "'Delete this job and its folder? Results elsewhere stay.') ? [lang, job] : [lang, '']",
            **event_options,
        ).then(self.rows, table_inputs, self.shown, **event_options)

    def rows(self, lang: str, chosen: list[str], opened: str, last_table: str) -> list[Any]:
        """The table; not sent again while nothing in it has changed."""
        rows = self.context.runs.rows(commands=COMMANDS)
        table = runs_html(rows, self.context, lang, chosen, opened)
        return [gr.skip(), gr.skip()] if table == last_table else [table, table]

    def _open(self, lang: str, event: gr.EventData) -> list[Any]:
        return self.show_run(lang, str(event.run))

    def show_run(self, lang: str, id: str) -> list[Any]:
        """One run below the table, in place of what was compared there."""
        try:
            row = self.context.runs.row(id)
        except ErnieKitError as error:
            raise notice(error, lang) from None
        name = gr.update(value=row.name, placeholder=run_name(row, self.context))
        deleted = gr.update(visible=row.is_job)
        return ["", gr.update(visible=True), name, deleted, *self.monitor.tick(lang, id, ())]

    def _closed(self, lang: str) -> list[Any]:
        return ["", gr.update(visible=False), gr.skip(), gr.skip(), *self.monitor.cleared(lang)]

    def _choose(self, chosen: list[str], event: gr.EventData) -> list[Any]:
        """One more to compare, or one less; what was compared is no longer what is chosen."""
        id = str(event.run)
        return [[one for one in chosen if one != id] if id in chosen else [*chosen, id], ""]

    def _rename(self, lang: str, id: str, name: str) -> Any:
        if not id:
            return gr.skip()
        try:
            return self.context.runs.rename(id, name or "")
        except ErnieKitError as error:
            raise notice(error, lang) from None

    def _resume(self, lang: str, owner: str, event: gr.EventData) -> list[Any]:
        try:
            return self.show_run(lang, self.context.runs.resume(str(event.run), owner).id)
        except ErnieKitError as error:
            raise notice(error, lang) from None

    def _compared(self, lang: str, chosen: list[str]) -> list[Any]:
        return [self._compare(lang, chosen), gr.update(visible=False), *self.monitor.cleared(lang)]

    def _compare(self, lang: str, chosen: list[str]) -> str:
        runs = self.context.runs
        known = {row.id: row for row in runs.rows()}
        ids = [id for id in chosen or [] if id in known][:MAX_COMPARED]
        if len(ids) < 2:
            return empty(translate("runs.two", lang))
        names = distinct({id: run_name(known[id], self.context) for id in ids})
        try:
            series = {names[id]: runs.series(id) for id in ids}
            differences = runs.compare(ids).differences
        except ErnieKitError as error:
            raise notice(error, lang) from None
        titles = {name: translate(f"watch.{name}", lang) for name in (*CURVES, "eval_loss")}
        charts = compare_charts(series, titles, translate("watch.waiting", lang), translate("tile.step", lang))
        return charts + differences_html(names, differences, lang)

    def _delete(self, lang: str, id: str) -> list[Any]:
        if not id:
            return [gr.skip()] * len(self.opened)
        try:
            self.context.jobs.delete(id)
        except ErnieKitError as error:
            raise notice(error, lang) from None
        return self._closed(lang)


def distinct(names: dict[str, str]) -> dict[str, str]:
    """The same names, numbered where two runs are called alike: a curve is found by its name."""
    out: dict[str, str] = {}
    for id, name in names.items():
        same = sum(other == name or other.startswith(f"{name} (") for other in out.values())
        out[id] = f"{name} ({same + 1})" if same else name
    return out
