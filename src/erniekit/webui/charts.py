"""Curves of one run, or of several in one picture, as inline SVG. Used by the pages; drawn by track's own charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from erniekit.track.charts import Series, line_chart
from erniekit.track.curves import Curve, smooth, thin
from erniekit.webui.runs import MetricSeries

COLOURS = 6  # of the style sheet; a seventh run takes the first again
MOST_POINTS = 600  # a picture is sent every second: no more than its pixels show
SMOOTH_FROM = 30  # points; below, a mean would only lag behind


def _curve(metrics: Mapping[str, MetricSeries], name: str) -> Curve:
    """The curve of a metric; empty where the run has not logged it."""
    curve = Curve()
    if name in metrics:
        for step, value in zip(metrics[name].steps, metrics[name].values):
            curve.add(step, value)
    return thin(curve, MOST_POINTS)


def run_charts(
    metrics: Mapping[str, MetricSeries], titles: Mapping[str, str], waiting: str, words: tuple[str, str, str],
    step: str = "step",
) -> str:  # fmt: skip
    """One chart for each of `titles` the run has logged: loss (with the evaluation's), learning rate, speed.

    `words`: what the mean and the single steps of a loss are called, and that of the evaluations.
    """
    figures = []
    for name, title in titles.items():
        series = _of_metric(metrics, name, words)
        if series:
            figures.append(line_chart(title, series, from_zero=name.endswith("per_second")))
    return grid(figures, step) if figures else empty(waiting)


def _of_metric(metrics: Mapping[str, MetricSeries], name: str, words: tuple[str, str, str]) -> list[Series]:
    drawn = _curve(metrics, name)
    series = []
    if name == "loss" and len(drawn) >= SMOOTH_FROM:
        series += [Series(words[0], smooth(drawn)), Series(words[1], drawn, faint=True)]
    elif len(drawn):
        series.append(Series(name, drawn))
    checked = _curve(metrics, f"eval_{name}")
    if len(checked):
        series.append(Series(words[2], checked, slot=2, markers=True))
    return series


def compare_charts(
    runs: Mapping[str, Mapping[str, MetricSeries]], titles: Mapping[str, str], nothing: str, step: str = "step"
) -> str:
    """The same metric of several runs in one chart each; a run keeps its colour in all of them."""
    figures = []
    for name, title in titles.items():
        series = []
        for at, (run, metrics) in enumerate(runs.items()):
            drawn = _curve(metrics, name)
            if len(drawn):
                drawn = smooth(drawn) if name == "loss" and len(drawn) >= SMOOTH_FROM else drawn
                series.append(Series(run, drawn, slot=at % COLOURS + 1))
        if series:
            figures.append(line_chart(title, series, from_zero=name.endswith("per_second")))
    return grid(figures, step) if figures else empty(nothing)


def grid(figures: Sequence[str], step: str = "step") -> str:
    """`step`: the word below the axis; track's charts have the English one."""
    drawn = "".join(figures).replace(">step</text>", f">{escape(step)}</text>")
    return f'<div class="ek-charts">{drawn}</div>'


def empty(text: str) -> str:
    return f'<div class="ek-empty">{escape(text)}</div>'
