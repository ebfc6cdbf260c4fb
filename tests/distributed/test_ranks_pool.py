"""The pool itself: real collectives, and a failing rank's own traceback."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from support.ranks import RankFailed, Ranks

pytestmark = pytest.mark.xdist_group("ranks")


def add_ranks(start: int) -> int:
    value = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(value)
    return int(value)


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one's own words")


def test_ranks_talk_to_each_other(ranks: Ranks) -> None:
    assert ranks.run(3, add_ranks, 10) == [33, 33, 33]
    assert ranks.run(2, add_ranks, 0) == [1, 1]


def test_a_failing_ranks_words_come_back(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="rank one's own words"):
        ranks.run(2, fail_on_one)
    assert ranks.run(2, add_ranks, 0) == [1, 1], "the pool starts anew"


def test_tests_that_use_the_pool_are_dealt_to_one_worker(ranks: Ranks, request: pytest.FixtureRequest) -> None:
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("only where xdist deals tests to workers")
    assert request.node.nodeid.endswith("@ranks"), "a second worker would start a second pool"
