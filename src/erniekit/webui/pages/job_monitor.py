"""Job monitor: one job - its state, progress, curves and log, with the buttons to stop and resume it.

Used by the Train, Runs, Evaluate and Export tabs. A timer polls once a second while the job runs.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from erniekit.errors import ErnieKitError
from erniekit.track.units import duration, metric_text, short
from erniekit.webui.charts import empty, run_charts
from erniekit.webui.jobs import WebJob
from erniekit.webui.pages.page_context import PageContext, notice
from erniekit.webui.runs import RunRow
from erniekit.webui.samples import last_samples, samples_html
from erniekit.webui.translations import translate

POLL_S = 1.0
LOG_LINES = 300
CURVES = ("loss", "learning_rate", "tokens_per_second")
SAMPLE_LABELS = {
    "title": "watch.samples",
    "prompt": "watch.prompt",
    "answer": "chat.answer",
    "expected": "watch.expected",
    "thinking": "chat.thinking",
}
RESULTS = ("eval_loss", "eval_ppl", "train_loss", "eval_runtime")


class JobMonitor:
    """`command`: the newest job of this command is shown again when a page is opened; empty: none."""

    def __init__(self, context: PageContext, name: str, command: str = "", charts: bool = True) -> None:
        self.context, self.command, labels = context, command, context.labels
        self.has_charts = charts
        self.job = gr.State("")
        self.last_shown = gr.State(())
        self.timer = gr.Timer(POLL_S, active=False)
        self.status = gr.HTML(empty(translate("watch.none", labels.lang)), elem_id=f"{name}-status")
        with gr.Row(visible=False) as self.buttons:
            self.stop = labels.make(
                gr.Button, {"value": "watch.stop"}, variant="stop", size="sm", elem_id=f"{name}-stop"
            )
            self.resume = labels.make(gr.Button, {"value": "watch.resume"}, size="sm", elem_id=f"{name}-resume")
        self.curves = gr.HTML("", visible=charts, elem_id=f"{name}-curves")
        self.samples = gr.HTML("", visible=charts, elem_id=f"{name}-samples")
        self.log = gr.HTML("", visible=False, elem_id=f"{name}-log")
        # Of every handler here, in this order.
        self.outputs = [
            self.job, self.last_shown, self.timer, self.status, self.buttons, self.stop, self.resume, self.curves,
            self.samples, self.log,
        ]  # fmt: skip
        event_options: dict[str, Any] = dict(show_progress="hidden", concurrency_limit=None)
        inputs = [context.lang, self.job, self.last_shown]
        self.resume.click(self._resume, [context.lang, context.owner, self.job], self.outputs, **event_options)
        self.timer.tick(self.tick, inputs, self.outputs, **event_options)
        context.lang.change(self.tick, inputs, self.outputs, **event_options)
        self.stop.click(self._stop, inputs[:2], self.outputs, **event_options)

    def on_open(self, page: Any) -> None:
        page.load(self._restore, [self.context.lang, self.context.owner], self.outputs, show_progress="hidden")

    def show(self, job: WebJob, lang: str) -> list[Any]:
        """A job that was just started or chosen."""
        return self.tick(lang, job.id, ())

    def tick(self, lang: str, id: str, last_shown: tuple[Any, ...]) -> list[Any]:
        if not id:  # another language was chosen
            skipped = [gr.skip()] * len(self.outputs)
            return [*skipped[:3], empty(translate("watch.none", lang)), *skipped[4:]]
        try:
            job = self.context.runs.get(id)
            row = self.context.runs.row(id)
        except ErnieKitError:
            return self.cleared(lang)
        log = self.context.jobs.log_tail(id).text if job.folder else ""
        current = (lang, job.state, job.starts, job.stop_requested, len(log), log[-80:], row.step, row.eval_loss)
        if current == tuple(last_shown) and not job.is_running:
            return [gr.skip()] * len(self.outputs)
        unchanged = current == tuple(last_shown) or not self.has_charts
        running = job.is_running
        return [
            id,
            current,
            gr.Timer(active=running),
            status_html(self.context, job, row, lang),
            gr.update(visible=running or row.can_resume),
            gr.update(
                value=translate("watch.force" if job.stop_requested else "watch.stop", lang),
                visible=running and bool(job.folder),
            ),
            gr.update(visible=row.can_resume),
            gr.skip() if unchanged else self._curves(job, lang),
            gr.skip() if unchanged else self._samples(job, lang),
            gr.skip() if current == tuple(last_shown) else gr.update(value=log_html(log, lang), visible=bool(log)),
        ]

    def cleared(self, lang: str) -> list[Any]:
        return [
            "", (), gr.Timer(active=False), empty(translate("watch.none", lang)), gr.update(visible=False),
            gr.skip(), gr.skip(), "", "", gr.update(value="", visible=False),
        ]  # fmt: skip

    def _curves(self, job: WebJob, lang: str) -> str:
        titles = {name: translate(f"watch.{name}", lang) for name in CURVES}
        labels = (translate("chart.mean", lang), translate("chart.each", lang), translate("tile.eval_loss", lang))
        waiting, step = translate("watch.waiting", lang), translate("tile.step", lang)
        return run_charts(self.context.runs.series(job.id), titles, waiting, labels, step)

    def _samples(self, job: WebJob, lang: str) -> str:
        labels = {name: translate(key, lang) for name, key in SAMPLE_LABELS.items()}
        return samples_html(last_samples(Path(job.output_dir)), labels) if job.output_dir else ""

    def _restore(self, lang: str, owner: str) -> list[Any]:
        """The newest job this browser started; a run goes on without a page."""
        own = (
            [job for job in self.context.jobs.list(owner) if job.command == self.command]
            if owner and self.command
            else []
        )
        return self.show(own[0], lang) if own else [gr.skip()] * len(self.outputs)

    def _stop(self, lang: str, id: str) -> list[Any]:
        """Once: it saves and ends. Once more, if that takes too long: it ends at once."""
        try:
            requested = self.context.jobs.get(id).stop_requested
            return self.show(self.context.jobs.stop(id, force=requested), lang)
        except ErnieKitError as error:
            raise notice(error, lang) from None

    def _resume(self, lang: str, owner: str, id: str) -> list[Any]:
        try:
            return self.show(self.context.runs.resume(id, owner), lang)
        except ErnieKitError as error:
            raise notice(error, lang) from None


def status_html(context: PageContext, job: WebJob, row: RunRow, lang: str) -> str:
    """State, command and folder in a line; the bar; the latest numbers."""
    state = "stopping" if job.is_running and job.stop_requested else job.state
    command = f"<code>erniekit {escape(job.command)} {escape(context.shown(job.recipe))}</code>" if job.folder else ""
    parts = [
        f'<div class="ek-line">{pill(job.state, translate(f"state.{state}", lang))}'
        f"<span>{escape(row.name or (job.id if job.folder else ''))}</span>{command}</div>"
    ]
    if job.output_dir:
        parts.append(
            f'<div class="ek-line"><span>{escape(translate("watch.output", lang))}</span>'
            f"<code>{escape(context.shown(job.output_dir))}</code></div>"
        )
    tiles: list[tuple[str, str]] = []
    if job.command == "train":
        parts.append(f'<div class="ek-bar {job.state}"><i style="width:{row.progress:.1%}"></i></div>')
        step = f"{row.step:,}" + (f" / {row.total_steps:,}" if row.total_steps else "")
        tiles = [("tile.step", step)]
        if row.loss is not None:
            tiles.append(("tile.loss", f"{row.loss:.4f}"))
        if row.eval_loss is not None:
            tiles.append(("tile.eval_loss", f"{row.eval_loss:.4f}"))
        if row.tokens_per_second is not None:
            tiles.append(("tile.speed", short(row.tokens_per_second)))
        tiles.append(("tile.time", duration(row.seconds)))
        if row.seconds_left is not None:
            tiles.append(("tile.left", duration(row.seconds_left)))
    elif job.command == "eval" and not job.is_running:
        results = context.runs.results(job.id)
        tiles = [(f"tile.{name}", metric_text(name, results[name])) for name in RESULTS if name in results]
    if tiles:
        cells = "".join(
            f'<div class="ek-tile"><span>{escape(translate(key, lang))}</span><b>{escape(text)}</b></div>'
            for key, text in tiles
        )
        parts.append(f'<div class="ek-tiles">{cells}</div>')
    return f'<div class="ek-status" data-state="{job.state}" data-step="{row.step}">{"".join(parts)}</div>'


def pill(state: str, text: str) -> str:
    return f'<span class="ek-pill {escape(state)}">{escape(text)}</span>'


def log_html(log: str, lang: str) -> str:
    """The end of a log; page.js keeps it scrolled to its last line until a person scrolls up."""
    end = escape("\n".join(log.splitlines()[-LOG_LINES:]))
    return f'<div class="ek-title">{escape(translate("watch.log", lang))}</div><pre class="ek-log">{end}</pre>'
