"""Runs table: the list of runs, and how compared runs differ, as HTML; everything in it is escaped. Used by runs.py."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from html import escape
from typing import Any

from erniekit.loss_table import SCORE_KEYS
from erniekit.printable import public
from erniekit.track.units import duration, short
from erniekit.webui.charts import empty
from erniekit.webui.pages.job_monitor import pill
from erniekit.webui.pages.page_context import PageContext
from erniekit.webui.runs import RunRow
from erniekit.webui.translations import translate

COLUMNS = ("run", "state", "command", "model", "step", "loss", "eval_loss", "speed", "time", "left")
# The gradio event of each kind of click in the table, so that every listener gets only its own.
EVENTS = {"open": "select", "choose": "input", "chat": "submit", "merge": "apply", "resume": "retry"}
# The part of an element that carries data-act names the event; the rest of the table does nothing.
CLICKS = """
element.addEventListener('click', event => {
  const hit = event.target.closest('[data-act]');
  if (hit) trigger(hit.dataset.act, { run: hit.dataset.run });
});
"""


def runs_html(
    rows: list[RunRow], context: PageContext, lang: str, chosen: Collection[str] = (), opened: str = ""
) -> str:
    if not rows:
        return empty(translate("runs.none", lang))
    head = "".join(f"<th>{escape(translate(f'runs.column.{name}', lang))}</th>" for name in COLUMNS)
    body = "".join(
        f'<tr class="{"opened" if row.id == opened else ""}" data-row="{escape(row.id)}">'
        f"<td>{_box(row, row.id in chosen, lang)}</td>{_cells(row, context, lang)}<td>{_actions(row, lang)}</td></tr>"
        for row in rows
    )
    return (
        f'<table class="ek-table ek-runs"><thead><tr><th></th>{head}<th></th></tr></thead><tbody>{body}</tbody></table>'
    )


def run_name(row: RunRow, context: PageContext) -> str:
    """The name a person gave; else the folder it works in, with its command unless it trains; else what it is, and when
    it started."""
    own = row.is_job and (not row.output_dir or row.id in row.output_dir)
    started = time.strftime("%m-%d %H:%M", time.localtime(row.created))
    folder = (
        context.shown(row.output_dir) if row.command == "train" else f"{row.command} {context.shown(row.output_dir)}"
    )
    return row.name or (f"{row.stage or row.command} {row.model} {started}" if own else folder)


def differences_html(names: Mapping[str, str], differences: dict[str, dict[str, Any]], lang: str) -> str:
    """The keys in which compared runs differ; `names`: run -> what it is called."""
    rows = {key: values for key, values in differences.items() if key != "output_dir"}
    if not rows:
        return empty(translate("runs.same", lang))
    head = "".join(f"<th>{escape(name)}</th>" for name in names.values())
    body = "".join(
        f"<tr><td><code>{escape(key)}</code></td>"
        + "".join(f"<td>{escape(public(_value(values.get(id))))}</td>" for id in names)
        + "</tr>"
        for key, values in rows.items()
    )
    title = f'<div class="ek-title">{escape(translate("runs.differences", lang))}</div>'
    return (
        f'{title}<div class="ek-scroll"><table class="ek-table"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


def _box(row: RunRow, chosen: bool, lang: str) -> str:
    """Trainings can be compared; other jobs have no curves."""
    if row.command != "train":
        return ""
    label = escape(translate("runs.choose", lang))
    return (
        f'<button type="button" class="ek-check" role="checkbox" aria-checked="{str(chosen).lower()}" '
        f'aria-label="{label}" title="{label}" data-act="{EVENTS["choose"]}" data-run="{escape(row.id)}"></button>'
    )


def _actions(row: RunRow, lang: str) -> str:
    can = {
        "chat": row.command == "train" and row.kind.weights and row.state != "running" and row.stage not in SCORE_KEYS,
        "merge": row.kind.adapter and row.kind.weights and row.state != "running",
        "resume": row.can_resume,
    }
    buttons = "".join(
        f'<button type="button" class="ek-act" data-act="{EVENTS[name]}" data-run="{escape(row.id)}">'
        f"{escape(translate(f'runs.{name}', lang))}</button>"
        for name, offered in can.items()
        if offered
    )
    return f'<div class="ek-acts">{buttons}</div>'


def _cells(row: RunRow, context: PageContext, lang: str) -> str:
    started = time.strftime("%m-%d %H:%M", time.localtime(row.created))
    step = f"{row.step:,}" + (f" / {row.total_steps:,}" if row.total_steps else "") if row.command == "train" else ""
    name = (
        f'<button type="button" class="ek-open" data-act="{EVENTS["open"]}" data-run="{escape(row.id)}">'
        f"{escape(run_name(row, context))}</button><small>{escape(started)}</small>"
    )
    cells = (
        ("name", name),
        ("brief", pill(row.state, translate(f"state.{row.state}", lang))),
        ("brief", escape(f"{row.command} {row.stage}".strip())),
        ("", escape(row.model)),
        ("number", escape(step)),
        ("number", _number(row, row.loss)),
        ("number", _number(row, row.eval_loss)),
        ("number", "" if row.command != "train" or row.tokens_per_second is None else short(row.tokens_per_second)),
        ("number", duration(row.seconds)),
        ("number", "" if row.seconds_left is None else duration(row.seconds_left)),
    )
    titles = [escape(translate(f"runs.column.{column}", lang)) for column in COLUMNS]
    return "".join(f'<td class="{kind}" data-title="{title}">{text}</td>' for (kind, text), title in zip(cells, titles))


def _number(row: RunRow, value: float | None) -> str:
    """Of trainings: another job in the same folder did not make its numbers."""
    return "" if row.command != "train" or value is None else f"{value:.4f}"
