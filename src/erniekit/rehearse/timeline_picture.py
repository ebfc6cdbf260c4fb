"""A picture of a rehearsed step: for each rank one row of computation and one of communication, as text for a terminal
or as SVG for a page. Called by `erniekit rehearse --timeline`. No torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence
from html import escape

from erniekit.intervals import HasEnds, both, joined, length
from erniekit.rehearse.timing import COPIES, RankTimes, TimeSpan, in_order

NARROWEST = 40  # columns of a picture in text
ROW, LEFT, HIGH, BETWEEN = 18, 64, 15, 8  # SVG: pixels of a row, of its label, of a box, between two ranks
THINNEST = 0.2  # pixels: of boxes that are narrower, those at the same place are drawn once
COMPUTING, STALLED = "#4f8fd0", "#e4e4e4"
# A mark and a colour of each transfer.
LOOKS = {
    "all_gather": ("G", "#6fae75"), "reduce_scatter": ("S", "#d9a441"), "all_reduce": ("R", "#c8605c"),
    "all_to_all": ("A", "#8f6fb5"), "send": ("M", "#4fa7a7"), "recv": ("M", "#4fa7a7"),
    "broadcast": ("B", "#b0804f"), COPIES: ("C", "#9a9a9a"),
}  # fmt: skip
OTHER = ("O", "#707070")


def as_text(ranks: Sequence[RankTimes], width: int = 100) -> list[str]:
    """Two lines for each rank; a mark in each slice of the step: see `legend`."""
    columns = max(NARROWEST, width - 12)
    out = []
    for times in ranks:
        each = (times.step or 1.0) / columns
        computed = _shares(times.computing, each, columns)
        moved = {m: _shares(joined(spans), each, columns) for m, spans in _by_mark(times.transfers).items()}
        top = "".join("#" if share >= 0.5 else "+" if share > 0 else "." for share in computed)
        below = "".join(_most({mark: shares[k] for mark, shares in moved.items()}) for k in range(columns))
        out += [f"rank {times.rank:<6} {top}", f"{'':<11} {below}"]
    drawn = set("".join(out[1::2]).upper())  # a transfer may be too short for a mark of its own
    return [*out, *legend(ranks, drawn)]


def _shares(spans: Sequence[HasEnds], each: float, columns: int) -> list[float]:
    """Of each slice, how much of it the spans fill."""
    out = [0.0] * columns
    for span in spans:
        for k in range(int(span.start / each), min(columns, int(span.end / each) + 1)):
            out[k] += max(0.0, min(span.end, (k + 1) * each) - max(span.start, k * each)) / each
    return out


def _by_mark(transfers: Sequence[TimeSpan]) -> dict[str, list[TimeSpan]]:
    found: dict[str, list[TimeSpan]] = defaultdict(list)
    for span in transfers:
        found[LOOKS.get(span.what, OTHER)[0]].append(span)
    return found


def _most(shares: dict[str, float]) -> str:
    """The mark that fills most of a slice, small where that is less than half of it."""
    mark = max(shares, key=lambda each: shares[each], default="")
    if not mark or shares[mark] <= 0:
        return "."
    return mark if shares[mark] >= 0.5 else mark.lower()


def legend(ranks: Sequence[RankTimes], drawn: Collection[str]) -> list[str]:
    names: dict[str, list[str]] = defaultdict(list)
    for op in dict.fromkeys(span.what for times in ranks for span in times.transfers):
        names[LOOKS.get(op, OTHER)[0]].append(op)
    marks = ", ".join(f"{mark} {'/'.join(of)}" for mark, of in sorted(names.items()) if mark in drawn)
    return [
        "# computes, + less than half of the slice, . not at all",
        f"transfers: {marks or 'none'}; small letters: less than half of the slice",
    ]


def as_svg(ranks: Sequence[RankTimes], width: int = 1200) -> str:
    """The upper row of a rank: what it computes, grey where it cannot; the lower one: its transfers, pale where they
    are hidden behind its computation."""
    step = ranks[0].step if ranks else 0.0
    scale = (width - LEFT - 10) / (step or 1.0)
    each = 2 * ROW + BETWEEN
    height = each * len(ranks) + 44
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="11">',
    ]
    for k, times in enumerate(ranks):
        top = 4 + each * k
        out.append(f'<text x="4" y="{top + 12}">rank {times.rank}</text>')
        out += _boxes(times.stalls(), top, scale, STALLED, "does not compute")
        out += _boxes(times.computing, top, scale, COMPUTING, "computes")
        for op, (_, colour) in [*LOOKS.items(), ("", OTHER)]:
            spans = [s for s in times.transfers if s.what == op or (not op and s.what not in LOOKS)]
            out += _boxes(in_order(spans), top + ROW, scale, colour, "", times.computing)
    out += _legend_boxes(ranks, height - 30)
    out += [f'<text x="4" y="{height - 6}">{escape(_summary(ranks))}</text>', "</svg>"]
    return "\n".join(out) + "\n"


def _boxes(
    spans: Sequence[TimeSpan], top: int, scale: float, colour: str, what: str, behind: Sequence[TimeSpan] = ()
) -> list[str]:
    """behind: the more of a span is inside these, the paler it is."""
    out, drawn = [], -1.0
    for span in spans:
        x, wide = LEFT + span.start * scale, (span.end - span.start) * scale
        if wide < THINNEST and x - drawn < THINNEST:
            continue
        drawn = x
        share = _hidden(span, behind)
        title = what or (span.call.with_line() if span.call is not None else span.what)
        more = f", {share:.0%} of it hidden" if behind else ""
        out.append(
            f'<rect x="{x:.1f}" y="{top}" width="{max(0.3, wide):.1f}" height="{HIGH}" fill="{colour}" '
            f'fill-opacity="{1 - 0.5 * share:.2f}"><title>{escape(title)}: {span.start * 1e3:.4g} to '
            f"{span.end * 1e3:.4g} ms{more}</title></rect>"
        )
    return out


def _hidden(span: TimeSpan, behind: Sequence[TimeSpan]) -> float:
    """The share of it; of the others, which may be many, only those near it are looked at."""
    first = bisect_left(behind, span.start, key=lambda other: other.end)
    after = bisect_left(behind, span.end, lo=first, key=lambda other: other.start)
    return length(both([span], behind[first:after])) / ((span.end - span.start) or 1.0)


def _legend_boxes(ranks: Sequence[RankTimes], y: int) -> list[str]:
    seen: dict[str, list[str]] = {}  # by colour: both ends of a message have one
    for op in dict.fromkeys(span.what for times in ranks for span in times.transfers):
        seen.setdefault(LOOKS.get(op, OTHER)[1], []).append(op)
    parts = [("computes", COMPUTING), ("does not compute", STALLED)]
    parts += [("/".join(ops) if colour != OTHER[1] else "other", colour) for colour, ops in seen.items()]
    out = []
    for k, (name, colour) in enumerate(parts):
        x = LEFT + 125 * k
        out.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        out.append(f'<text x="{x + 14}" y="{y}">{escape(name)}</text>')
    return out


def _summary(ranks: Sequence[RankTimes]) -> str:
    step = ranks[0].step if ranks else 0.0
    return f"one step, {step * 1e3:.4g} ms; above computation, below transfers: the paler, the more of them is hidden"
