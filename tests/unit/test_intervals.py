"""Intervals that overlap, touch and lie inside one another."""

from __future__ import annotations

from erniekit.intervals import Interval, both, joined, length


def test_what_overlaps_or_touches_is_one_and_counted_once() -> None:
    spans = [Interval(5, 6), Interval(0, 2), Interval(1, 3), Interval(3, 4), Interval(0.5, 1)]
    assert joined(spans) == [(0, 4), (5, 6)]
    assert length(joined(spans)) == 5


def test_both_is_where_both_are() -> None:
    first, second = [Interval(0, 4), Interval(6, 7)], [Interval(1, 2), Interval(3, 6.5), Interval(6.5, 9)]
    assert list(both(first, second)) == [(1, 2), (3, 4), (6, 6.5), (6.5, 7)]
    assert list(both(second, first)) == list(both(first, second))
    assert list(both(first, [])) == []
