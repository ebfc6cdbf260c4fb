"""Pictures dealt out to ranks: all of them once, the loads as even as the pictures allow."""

from __future__ import annotations

import pytest

from erniekit.parallel.dealt_inputs import deal


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_picture_is_looked_at_once(ranks: int) -> None:
    hands = deal([5.0, 1, 7, 2, 2, 9, 4], ranks)
    assert sorted(n for hand in hands for n in hand) == list(range(7))
    assert len(hands) == ranks


def test_the_dearest_are_dealt_first_so_that_loads_are_even() -> None:
    hands = deal([3.0, 3, 2, 2, 2], 2)
    assert [sum([3, 3, 2, 2, 2][n] for n in hand) for hand in hands] in ([6, 6], [7, 5])
    assert deal([10.0, 1, 1, 1], 2) == [[0], [1, 2, 3]]


def test_a_rank_may_have_none() -> None:
    assert deal([4.0], 3) == [[0], [], []]
    assert deal([], 2) == [[], []]
