"""A picture of a pipeline's step from the simulator's timeline: as text for a terminal, as SVG for a page.

Called by `erniekit plan --timeline` and by other users of a timeline. No torch.
"""

from __future__ import annotations

from erniekit.parallel.pipeline_actions import BACKWARD, COMPUTED, FORWARD, INPUT, WEIGHT
from erniekit.parallel.pipeline_simulator import Span, Timeline

MARKS = {FORWARD: "F", BACKWARD: "B", INPUT: "I", WEIGHT: "W"}
COLOURS = {FORWARD: "#4f8fd0", BACKWARD: "#d9a441", INPUT: "#d9a441", WEIGHT: "#6fae75"}
NARROWEST = 40  # columns of a picture in text
ROW, LEFT, HIGH = 26, 64, 20  # SVG: pixels of a rank, of its label, of a box


def as_text(timeline: Timeline, width: int = 100) -> list[str]:
    """A line for each rank: what it computes in each slice of the step, by its letter; a dot where it waits."""
    columns = max(NARROWEST, width - 10)
    each = timeline.seconds / columns or 1.0
    out = []
    for rank, spans in enumerate(timeline.ranks):
        line = "".join(_mark(spans, (k + 0.5) * each) for k in range(columns))
        out.append(f"rank {rank:<4} {line}")
    out.append(_summary(timeline))
    return out


def _mark(spans: tuple[Span, ...], at: float) -> str:
    here = next((s for s in spans if s.start <= at < s.end and s.action.kind in COMPUTED), None)
    if here is None:
        return "."
    mark = MARKS[here.action.kind]
    # Neighbouring micro-batches differ by their letters' case.
    return mark if here.action.micro_batch % 2 == 0 else mark.lower()


def _summary(timeline: Timeline) -> str:
    return (
        f"F forward, B backward, I and W its two parts, . waits; a step {timeline.seconds:.3g} s, the busiest rank "
        f"waits {timeline.bubble:.0%} of it"
    )


def as_svg(timeline: Timeline, width: int = 1200) -> str:
    """One row for each rank, a box for each computation with its micro-batch; darker: a later stage of the rank."""
    scale = (width - LEFT - 10) / (timeline.seconds or 1.0)
    height = ROW * len(timeline.ranks) + 30
    ranks = len(timeline.ranks)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="11">',
    ]
    for rank, spans in enumerate(timeline.ranks):
        top = 4 + ROW * rank
        out.append(f'<text x="4" y="{top + 14}">rank {rank}</text>')
        for span in (s for s in spans if s.action.kind in COMPUTED):
            kind, stage, m = span.action
            x, wide = LEFT + span.start * scale, (span.end - span.start) * scale
            faded = max(0.4, 1 - 0.25 * (stage // ranks))
            out.append(
                f'<rect x="{x:.1f}" y="{top}" width="{max(0.5, wide - 0.5):.1f}" height="{HIGH}" '
                f'fill="{COLOURS[kind]}" fill-opacity="{faded}"><title>{kind} of stage {stage}, micro-batch {m}: '
                f"{span.start:.4g} to {span.end:.4g} s</title></rect>"
            )
            if wide > 12:
                out.append(f'<text x="{x + 2:.1f}" y="{top + 14}">{MARKS[kind]}{m}</text>')
    out += [f'<text x="4" y="{height - 8}">{_summary(timeline)}</text>', "</svg>"]
    return "\n".join(out) + "\n"
