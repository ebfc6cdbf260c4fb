"""Arithmetic of intervals on a line of time: what a rehearsed step and a profile of a real one say of overlap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol


class HasEnds(Protocol):
    @property
    def start(self) -> float: ...

    @property
    def end(self) -> float: ...


class Interval(NamedTuple):
    start: float
    end: float


def joined(spans: Iterable[HasEnds]) -> list[Interval]:
    """In order, those that overlap as one."""
    out: list[Interval] = []
    for span in sorted(spans, key=lambda each: (each.start, each.end)):
        if out and span.start <= out[-1].end:
            out[-1] = Interval(out[-1].start, max(out[-1].end, span.end))
        else:
            out.append(Interval(span.start, span.end))
    return out


def both(first: Sequence[HasEnds], second: Sequence[HasEnds]) -> Iterator[Interval]:
    """Where both are; each in order and without overlaps."""
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i].start, second[j].start), min(first[i].end, second[j].end)
        if end > start:
            yield Interval(start, end)
        if first[i].end < second[j].end:
            i += 1
        else:
            j += 1


def length(spans: Iterable[HasEnds]) -> float:
    return sum((span.end - span.start for span in spans), 0.0)
