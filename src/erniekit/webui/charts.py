"""Curves of one run, or of several in one picture, as inline SVG. Used by the pages; drawn by track's own charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from erniekit.track.charts import Series, line_chart
from erniekit.track.curves import Curve, smooth, thin
from erniekit.webui.runs import MetricSeries

COLOURS = 6  # of the style sheet; a seventh run takes the first again
MAX_POINTS = 600  # a picture is sent every second: no more than its pixels show
SMOOTH_FROM = 30  # points; below, a mean would only lag behind


def _curve(metrics: Mapping[str, MetricSeries], name: str) -> Curve:
    """The curve of a metric; empty where the run has not logged it."""
    curve = Curve()
    if name in metrics:
        for step, value in zip(metrics[name].steps, metrics[name].values):
            curve.add(step, value)
    return thin(curve, MAX_POINTS)


def run_charts(
    metrics: Mapping[str, MetricSeries], titles: Mapping[str, str], waiting: str, labels: tuple[str, str, str],
    step: str = "step",
) -> str:  # fmt: skip
    """One chart for each of `titles` the run has logged: loss (with the evaluation's), learning rate, speed.

    `labels`: of the mean and of the single steps of a loss, and of the evaluations.
    """
    figures = []
    for name, title in titles.items():
        series = _series_of(metrics, name, labels)
        if series:
            figures.append(line_chart(title, series, from_zero=name.endswith("per_second")))
    return grid(figures, step) if figures else empty(waiting)


def _series_of(metrics: Mapping[str, MetricSeries], name: str, labels: tuple[str, str, str]) -> list[Series]:
    curve = _curve(metrics, name)
    series = []
    if name == "loss" and len(curve) >= SMOOTH_FROM:
        series += [Series(labels[0], smooth(curve)), Series(labels[1], curve, faint=True)]
    elif len(curve):
        series.append(Series(name, curve))
    evaluated = _curve(metrics, f"eval_{name}")
    if len(evaluated):
        series.append(Series(labels[2], evaluated, slot=2, markers=True))
    return series


def compare_charts(
    runs: Mapping[str, Mapping[str, MetricSeries]], titles: Mapping[str, str], nothing: str, step: str = "step"
) -> str:
    """The same metric of several runs in one chart each; a run keeps its colour in all of them."""
    figures = []
    for name, title in titles.items():
        series = []
        for at, (run, metrics) in enumerate(runs.items()):
            curve = _curve(metrics, name)
            if len(curve):
                curve = smooth(curve) if name == "loss" and len(curve) >= SMOOTH_FROM else curve
                series.append(Series(run, curve, slot=at % COLOURS + 1))
        if series:
            figures.append(line_chart(title, series, from_zero=name.endswith("per_second")))
    return grid(figures, step) if figures else empty(nothing)


def grid(figures: Sequence[str], step: str = "step") -> str:
    """`step`: the label below the axis; track's charts have the English one."""
    html = "".join(figures).replace(">step</text>", f">{escape(step)}</text>")
    return f'<div class="ek-charts">{html}</div>'


def empty(text: str) -> str:
    return f'<div class="ek-empty">{escape(text)}</div>'
