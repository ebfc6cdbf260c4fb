"""<output_dir>/report.html: the run on one page that needs no network, from run.json and metrics.jsonl.

Called by the recipes when a run ends, and for any folder that holds those two files.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from erniekit.files import own, settle
from erniekit.printable import counted
from erniekit.track import jsonl, runfile
from erniekit.track.atomic import write_text
from erniekit.track.charts import Series, line_chart
from erniekit.track.curves import Curve, read_curves, smooth, thin
from erniekit.track.page import document
from erniekit.track.samples import COLUMNS, last_samples
from erniekit.track.tables import config_table, table, value_html
from erniekit.track.units import duration, metric_text, short

FILE = "report.html"
SMOOTH_FROM = 100  # points: fewer are readable as they are

# (metric, title, axis from zero); the evaluation's curve of the same metric is drawn with it
MAIN_CHARTS = (
    ("loss", "Loss", False),
    ("rewards/margins", "Reward margin, chosen over rejected", False),
    ("rewards/accuracies", "Share of pairs with the higher reward on the chosen answer", True),
    ("learning_rate", "Learning rate", True),
    ("tokens_per_second", "Throughput, tokens/s", True),
    ("grad_norm", "Gradient norm, before clipping", True),
)
# in a main chart already, or a plain function of the step
NOT_DRAWN = {name for name, _, _ in MAIN_CHARTS} | {"progress_or_epoch", "epoch", "interval_runtime", "runtime"}


def write_report(output_dir: str | Path) -> Path:
    """Write report.html next to run.json and metrics.jsonl; either may be missing, and the page shows that."""
    folder = Path(output_dir)
    record = runfile.read(folder)
    curves = read_curves(folder / jsonl.FILE)
    title = f"{folder.resolve().name} · erniekit run"
    parts = [_header(folder, record), _tiles(record, curves), _charts(curves), _samples(folder), *_sections(record)]
    path = own(folder / FILE)
    write_text(path, document(title, "\n".join(part for part in parts if part)))
    return settle(path)


def _header(folder: Path, record: Mapping[str, Any]) -> str:
    status = str(record.get("status", "unknown"))
    when = f"{_time(record.get('started'))} to {_time(record.get('finished') or record.get('updated'))}"
    version = f"erniekit {record['version']}, " if record.get("version") else ""
    command = f"<pre>{escape(str(record['command']))}</pre>" if record.get("command") else ""
    missing = "" if record else "<p class=muted>run.json is missing here: only the curves are known.</p>"
    return (
        f'<div class="head"><h1>{escape(folder.resolve().name)}</h1>'
        f'<span class="pill {escape(status)}">{escape(status)}</span></div>'
        f'<p class="sub">{escape(version + when) if record else ""}</p>{command}{missing}'
    )


def _tiles(record: Mapping[str, Any], curves: Mapping[str, Curve]) -> str:
    tiles = []

    def tile(label: str, value: str, more: str = "") -> None:
        tiles.append(
            f'<div class="tile"><div class="label">{escape(label)}</div>'
            f'<div class="value">{escape(value)}</div><div class="more">{escape(more)}</div></div>'
        )

    loss = curves.get("loss")
    if loss:
        tile("Steps", f"{loss.steps[-1]:,}", f"of {record['total_steps']:,}" if record.get("total_steps") else "")
        tile("Loss", f"{loss.values[-1]:.4f}", f"from {loss.values[0]:.4f}")
    evaluated = curves.get("eval_loss")
    if evaluated:
        best = min(range(len(evaluated)), key=evaluated.values.__getitem__)
        tile("Best eval loss", f"{evaluated.values[best]:.4f}", f"at step {evaluated.steps[best]:,}")
    if curves.get("tokens_per_second"):
        tile("Tokens/s", short(round(median(curves["tokens_per_second"].values))), "median")
    if curves.get("mfu"):
        tile("MFU", metric_text("mfu", median(curves["mfu"].values)), "median")
    if curves.get("max_memory_allocated"):
        tile("Peak memory", f"{max(curves['max_memory_allocated'].values):.2f}", "GiB")
    seconds = record.get("metrics", {}).get("train_runtime")
    if seconds is not None:
        tile("Training time", duration(seconds))
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _charts(curves: Mapping[str, Curve]) -> str:
    if not any(len(curve) for curve in curves.values()):
        return "<p class=muted>No step was logged: metrics.jsonl is missing or empty.</p>"
    main = [_chart(curves, name, title, zero) for name, title, zero in MAIN_CHARTS]
    others = {name.removeprefix("eval_"): None for name in curves}
    rest = [_chart(curves, name, name, "memory" in name or name == "mfu") for name in others if name not in NOT_DRAWN]
    html = f'<h2>Curves</h2><div class="charts">{"".join(main)}</div>'
    if any(rest):
        html += f'<details><summary>More curves</summary><div class="charts">{"".join(rest)}</div></details>'
    return html


def series_of(curves: Mapping[str, Curve], name: str) -> list[Series]:
    """A metric of training, with its running mean where it is the loss, and of evaluation."""
    train, evaluated = curves.get(name, Curve()), curves.get(f"eval_{name}", Curve())
    series = [Series("train", thin(train))]
    if name == "loss" and len(train) >= SMOOTH_FROM:
        series = [
            Series("train, running mean", thin(smooth(train))),
            Series("train", thin(train), faint=True),
        ]
        series.reverse()  # the mean is drawn over the noise
    return [*series, Series("evaluation", thin(evaluated), slot=2, markers=True)]


def _chart(curves: Mapping[str, Curve], name: str, title: str, from_zero: bool) -> str:
    train, evaluated = curves.get(name, Curve()), curves.get(f"eval_{name}", Curve())
    lost = train.not_finite + evaluated.not_finite
    note = f"{lost} logged value{'s were' if lost > 1 else ' was'} not finite and cannot be drawn." if lost else ""
    if not len(train) and not len(evaluated):
        return ""
    return line_chart(title, series_of(curves, name), from_zero=from_zero, note=note)


def _sections(record: Mapping[str, Any]) -> list[str]:
    """Heading and card for each part of run.json that has something in it."""
    next_commands = "\n".join(map(str, record.get("next_commands") or []))
    latest = {kind: _with_units(numbers) for kind, numbers in (record.get("latest") or {}).items()}
    dropped = record.get("events_dropped")
    happened = [{**event, "time": _time(event.get("time"))} for event in record.get("events") or []]
    events = table(happened, ("time", "step", "name", "text"))
    if dropped:
        events += f"<p class=note>{counted(dropped, 'earlier event is', 'earlier events are')} not kept.</p>"
    cards = (
        ("Next", f"<pre>{escape(next_commands)}</pre>" if next_commands else ""),
        ("Results", value_html(_with_units(record.get("metrics") or {}))),
        ("Last logged", value_html(latest)),
        ("Events", events),
        ("Values derived or changed", _notes(record.get("notes") or [])),
        ("Checks before the first step", table(record.get("checks") or [], ("check", "found"))),
        ("Data", value_html(record.get("data") or {})),
        ("Coverage", value_html(record.get("coverage") or [])),
        ("Kernels", value_html(record.get("kernels") or [])),
        ("Environment", value_html(record.get("environment") or {})),
    )
    html = [
        f'<h2>{title}</h2><div class="card">{card}</div>' if not card.startswith("<pre") else f"<h2>{title}</h2>{card}"
        for title, card in cards
        if card
    ]
    if record.get("config"):
        html.append(f"<h2>Configuration</h2>{config_table(record['config'])}")
    return html


def _samples(folder: Path) -> str:
    step, rows = last_samples(folder)
    if not rows:
        return ""
    return f'<h2>Generated answers, step {step:,}</h2><div class="card">{table(rows, COLUMNS)}</div>'


def _notes(notes: list[Any]) -> str:
    if notes and all(isinstance(note, Mapping) for note in notes):
        return table(notes, ("key", "old", "new", "reason"))
    return value_html([str(note) for note in notes])


def _with_units(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Text for the numbers that carry a unit; the others are left to the table."""
    return {
        name: metric_text(name, value) if isinstance(value, float) or value is None else value
        for name, value in metrics.items()
    }


def _time(stamp: Any) -> str:
    try:
        return f"{datetime.fromisoformat(str(stamp)):%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return "?"
