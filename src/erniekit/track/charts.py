"""Line charts as inline SVG, readable without a script, exact values on hover. Used by report.py and the web page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from erniekit.track.curves import Curve
from erniekit.track.units import scientific, short

WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 26  # room for tick labels
MARKERS_UP_TO = 60  # points; more would hide the line


@dataclass(frozen=True)
class Series:
    """`slot` picks the colour (1 train, 2 evaluation); a faint line is the noise behind its mean."""

    name: str
    curve: Curve
    slot: int = 1
    faint: bool = False
    markers: bool = False

    @property
    def look(self) -> str:
        """Its classes in the style sheet."""
        return f"s{self.slot} faint" if self.faint else f"s{self.slot}"


@dataclass(frozen=True)
class Scale:
    """Values low..high of the data on pixels start..stop of the picture."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def line_chart(title: str, series: Sequence[Series], *, from_zero: bool = False, note: str = "") -> str:
    """One figure: title, legend where there are several series, picture, numbers for hover."""
    series = [one for one in series if len(one.curve)]
    picture, x = _picture(series, from_zero)
    return (
        f'<figure class="chart"><figcaption><h3>{escape(title)}</h3>{_legend(series)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_aria_label(title, series))}">'
        f"{picture}"
        f'<line class="cross" y1="{TOP}" y2="{HEIGHT - BOTTOM}" hidden></line></svg>'
        f'<div class="tip" hidden></div>{f"<p class=note>{escape(note)}</p>" if note else ""}'
        f'<script type="application/json">{_numbers(series, x)}</script></figure>'
    )


# For a chart in a file of its own; report.html has a style sheet of its own for the same classes.
STANDALONE = """
text { font: 11px system-ui, sans-serif; fill: #52514e; } .title { font-size: 14px; font-weight: 600; fill: #0b0b0b; }
.grid { stroke: #e1e0d9; } .axis { stroke: #c3c2b7; } path { fill: none; stroke-width: 2; }
path.s1 { stroke: #2a78d6; } path.s2 { stroke: #d6541c; } path.faint { opacity: 0.3; stroke-width: 1; }
circle.s1, text.s1 { fill: #2a78d6; } circle.s2, text.s2 { fill: #d6541c; }
"""
CAPTION = 26  # height above each picture


def svg_chart(charts: Sequence[tuple[str, Sequence[Series]]]) -> str:
    """A whole SVG document: (title, series) one below the other, for a file or a notebook. Series have points."""
    each, parts = HEIGHT + CAPTION, []
    for number, (title, series) in enumerate(charts):
        names = "".join(
            f'<text class="s{one.slot}" x="{WIDTH - RIGHT - 110 * (len(series) - 1 - k)}" y="17" text-anchor="end">'
            f"{escape(one.name)}</text>"
            for k, one in enumerate(series if len(series) > 1 else ())
        )
        parts.append(
            f'<g transform="translate(0 {number * each})"><text class="title" x="{LEFT}" y="17">{escape(title)}</text>'
            f'{names}<g transform="translate(0 {CAPTION})">{_picture(series, False)[0]}</g></g>'
        )
    height = each * len(charts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="{escape("; ".join(_aria_label(*chart) for chart in charts))}">'
        f'<style>{STANDALONE}</style><rect width="100%" height="100%" fill="#fcfcfb"></rect>{"".join(parts)}</svg>'
    )


def _picture(series: Sequence[Series], from_zero: bool) -> tuple[str, Scale]:
    """Grid and lines, and where steps are."""
    steps = [step for one in series for step in (one.curve.steps[0], one.curve.steps[-1])]
    values = [value for one in series for value in (min(one.curve.values), max(one.curve.values))]
    x = Scale(*_span(min(steps), max(steps), 0.0), LEFT, WIDTH - RIGHT)
    low, high = _span(min(values), max(values), 0.06)
    y = Scale(0.0 if from_zero and min(values) >= 0 else low, high, HEIGHT - BOTTOM, TOP)
    return "".join([_grid(x, y), *(_draw(one, x, y) for one in series)]), x


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) within low..high, near `about` of them."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _span(low: float, high: float, margin: float) -> tuple[float, float]:
    if low == high:
        reach = abs(low) * 0.1 or 1.0
        return low - reach, high + reach
    return low - (high - low) * margin, high + (high - low) * margin


def _grid(x: Scale, y: Scale) -> str:
    parts = []
    values = ticks(y.low, y.high, 4)
    # All of them as powers of ten where one is: 0.00105 next to 9.5e-4 is hard to compare.
    small = any("e-" in short(value) for value in values)
    for value in values:
        at = f"{y(value):.1f}"
        text = scientific(value) if small and value else short(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"></line>')
        parts.append(f'<text x="{LEFT - 8}" y="{at}" dy="0.32em" text-anchor="end">{text}</text>')
    for value in ticks(x.low, x.high, 5):
        if value == int(value) and x(value) > LEFT + 10:  # half a step is no step; "step" stands at the left end
            at = f"{x(value):.1f}"
            parts.append(f'<text x="{at}" y="{HEIGHT - 8}" text-anchor="middle">{short(value)}</text>')
    parts.append(f'<text x="{LEFT - 8}" y="{HEIGHT - 8}" text-anchor="end">step</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y.start}" y2="{y.start}"></line>')
    return "".join(parts)


def _draw(one: Series, x: Scale, y: Scale) -> str:
    points = [(x(step), y(value)) for step, value in zip(one.curve.steps, one.curve.values)]
    path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in points)
    drawn = f'<path class="{one.look}" d="{path}"></path>'
    if len(points) == 1 or (one.markers and len(points) <= MARKERS_UP_TO):
        dots = (f'<circle class="s{one.slot}" cx="{px:.1f}" cy="{py:.1f}" r="3.5"></circle>' for px, py in points)
        drawn += "".join(dots)
    return drawn


def _legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    keys = (f'<span><i class="key {one.look}"></i>{escape(one.name)}</span>' for one in series)
    return f'<div class="legend">{"".join(keys)}</div>'


def _aria_label(title: str, series: Sequence[Series]) -> str:
    ends = (f"{one.name} {short(one.curve.values[0])} to {short(one.curve.values[-1])}" for one in series)
    return f"{title} over steps: " + ", ".join(ends)


def _numbers(series: Sequence[Series], x: Scale) -> str:
    shown = [
        {
            "name": one.name,
            "look": one.look,
            "steps": list(one.curve.steps),
            "values": [float(f"{value:.6g}") for value in one.curve.values],
        }
        for one in series
    ]
    numbers = {"low": x.low, "high": x.high, "left": LEFT, "right": RIGHT, "width": WIDTH, "series": shown}
    # "<" never appears in the page's script blocks, so a name cannot end one.
    return json.dumps(numbers, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")


# For a page with charts. They may be replaced while a run goes on, so one listener on the document serves those there
# are: it shows the nearest logged step of each series under the pointer.
HOVER = """
(() => {
  'use strict';
  const nearest = (steps, step) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const mid = (low + high) >> 1;
      if (steps[mid] <= step) low = mid; else high = mid;
    }
    return step - steps[low] <= steps[high] - step ? low : high;
  };
  const row = (parts, strong) => {
    const line = document.createElement('div'), value = document.createElement('b');
    value.textContent = strong;
    line.append(...parts, value);
    return line;
  };
  const leave = except => {
    for (const figure of document.querySelectorAll('.chart')) {
      if (figure === except) continue;
      figure.querySelector('.tip').hidden = true;
      figure.querySelector('.cross').setAttribute('hidden', '');
    }
  };
  document.addEventListener('pointermove', event => {
    const svg = event.target.closest?.('.chart svg');
    const figure = svg?.closest('.chart');
    leave(figure);
    if (!figure) return;
    const data = JSON.parse(figure.querySelector('script').textContent);
    const cross = svg.querySelector('.cross'), tip = figure.querySelector('.tip');
    const inner = data.width - data.left - data.right;
    const box = svg.getBoundingClientRect(), scale = data.width / box.width;
    const share = ((event.clientX - box.left) * scale - data.left) / inner;
    const wanted = data.low + Math.min(1, Math.max(0, share)) * (data.high - data.low);
    const main = data.series[0], step = main.steps[nearest(main.steps, wanted)];
    const at = data.left + (step - data.low) / (data.high - data.low) * inner;
    cross.setAttribute('x1', at);
    cross.setAttribute('x2', at);
    cross.removeAttribute('hidden');
    tip.replaceChildren(row(['step '], step));
    for (const one of data.series) {
      const index = nearest(one.steps, wanted), key = document.createElement('i');
      key.className = 'key ' + one.look;
      const where = one.steps[index] === step ? '' : ' (step ' + one.steps[index] + ')';
      tip.append(row([key, one.name + where + '  '], one.values[index]));
    }
    tip.hidden = false;
    const frame = figure.getBoundingClientRect(), x = at / scale + box.left - frame.left;
    const room = figure.clientWidth - tip.offsetWidth - 8;
    const side = x > figure.clientWidth / 2 ? x - tip.offsetWidth - 12 : x + 12;
    tip.style.left = Math.max(8, Math.min(room, side)) + 'px';
    tip.style.top = box.top - frame.top + 8 + 'px';
  });
})();
"""
