"""The pool of blocks: who begins with the same tokens shares blocks, and what nobody holds goes when room is wanted."""

from __future__ import annotations

import pytest
import torch

from erniekit.api_load import Found, find_model
from erniekit.demo.tiny import make_tiny_model
from erniekit.devices import pick
from erniekit.serve.engines.embedded import EmbeddedEngine, EngineLimits
from erniekit.serve.engines.paged import PagedCache
from support.engine_jobs import LENGTH, alone, answers, job


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Found:
    return find_model(make_tiny_model(tmp_path_factory.mktemp("small")))


@pytest.fixture
def cache(small: Found) -> PagedCache:
    return PagedCache(small.weights.config, 6, 4, torch.float32, "cpu")


def filled(cache: PagedCache, ids: list[int], model: str = "m") -> list[int]:
    table: list[int] = []
    assert cache.grow(table, len(ids))
    cache.keep(ids, model, table)
    return table


def test_a_beginning_is_shared_up_to_the_block_before_the_last_token(cache: PagedCache):
    first = filled(cache, list(range(10)))
    for ids, blocks in ((list(range(10)), 2), (list(range(8)), 1), ([*range(9)], 2), ([0, 1, 2, 9, *range(4, 10)], 0)):
        table: list[int] = []
        assert cache.share(ids, "m", table) == 4 * blocks
        assert table == first[:blocks]
        cache.release(table)
    other: list[int] = []
    assert cache.share(list(range(10)), "an adapter", other) == 0


def test_a_block_is_free_for_others_only_when_its_last_holder_has_left(cache: PagedCache):
    first, second = filled(cache, list(range(8))), []
    cache.share(list(range(9)), "m", second)
    cache.release(first)
    assert cache.free_blocks == 4
    assert not cache.grow([], 5 * 4)
    cache.release(second)
    assert cache.used == 0
    assert cache.grow([], 6 * 4)


def test_the_end_of_the_oldest_goes_first_when_room_is_wanted(cache: PagedCache):
    cache.release(filled(cache, list(range(8))))
    cache.release(filled(cache, list(range(50, 58))))
    table: list[int] = []
    assert cache.grow(table, 3 * 4)
    assert cache.share(list(range(9)), "m", []) == 4, "its second block went"
    assert cache.share(list(range(50, 59)), "m", []) == 8


@pytest.mark.parametrize("recorded", [False, True])
def test_answers_to_prompts_that_begin_alike_are_those_of_each_alone(small: Found, recorded: bool):
    cache = PagedCache(small.weights.config, 64, 4, torch.float32, "cpu")
    limits = EngineLimits(sequences=3, tokens=16, length=LENGTH)
    engine = EmbeddedEngine({"m": small.build()}, cache, limits, pick("cpu", False) if recorded else None)
    begin = list(range(100, 121))
    asked = [[*begin, *end] for end in ([5, 6], [7], [5, 6, 8, 9, 10], [], [5, 6])]
    try:
        assert answers(engine, [job(p) for p in asked]) == [alone(small.build(), p) for p in asked]
        (said,) = answers(engine, [job(asked[0])])
        before = cache.shared
        assert answers(engine, [job([*asked[0], *said, 7])]) == [alone(small.build(), [*asked[0], *said, 7])]
        assert cache.shared - before >= 32, "a conversation that goes on computes its new turn alone"
        assert engine.load().cache_used == 0
    finally:
        engine.stop()


@pytest.mark.parametrize("recorded", [False, True])
def test_numbers_that_a_broken_sequence_left_in_the_pool_reach_no_other(small: Found, recorded: bool):
    cache = PagedCache(small.weights.config, 64, 4, torch.float32, "cpu")
    for pool in (*cache.keys, *cache.values):
        pool[: cache.blocks * cache.size] = float("nan")
    limits = EngineLimits(sequences=3, tokens=16, length=LENGTH)
    engine = EmbeddedEngine({"m": small.build()}, cache, limits, pick("cpu", False) if recorded else None)
    asked = [[5, 6], list(range(100, 130)), [7] * 9]  # rows of unlike length decode together
    try:
        assert answers(engine, [job(p) for p in asked]) == [alone(small.build(), p) for p in asked]
    finally:
        engine.stop()
