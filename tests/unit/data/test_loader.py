"""Steps of micro-batches: the same global batches for any number of ranks and workers, and an exact resume."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from erniekit.data.loader import BatchLoader
from erniekit.data.mix import SampleOrder
from erniekit.data.pack import PackStream
from erniekit.data.types import IGNORE, Sample

LENGTHS = [np.random.RandomState(s).randint(3, 40, n).astype(np.int32) for s, n in enumerate((70, 30))]


class Numbered:
    """Sample i of source s is its own number, over and over: a batch shows what it is made of."""

    def __init__(self, source, fails_at=None):
        self.source, self.fails_at = source, fails_at

    def sample(self, index):
        if index == self.fails_at:
            raise OSError("the disk is gone")
        ids = np.full(LENGTHS[self.source][index], 1000 * (self.source + 1) + index, dtype=np.int32)
        return Sample(ids, ids)


SOURCES = [Numbered(0), Numbered(1)]


def stream(epochs=None, **options):
    order = SampleOrder([70, 30], [0.6, 0.4], seed=11, shuffle=epochs is None)
    return PackStream(order, LENGTHS, 64, buffer_size=20, epochs=epochs, **options)


def take(loader, steps):
    out = []
    for step in loader:
        out.append(step)
        if len(out) == steps:
            break
    loader.close()
    return out


def same(a, b):
    fields = ("input_ids", "labels", "positions", "cu_seqlens")
    return (
        len(a) == len(b)
        and all(len(x) == len(y) for x, y in zip(a, b))
        and all(
            m.pack_indices == n.pack_indices and all(torch.equal(getattr(m, f), getattr(n, f)) for f in fields)
            for x, y in zip(a, b)
            for m, n in zip(x, y)
        )
    )


def test_a_step_holds_accumulation_micro_batches_of_consecutive_packs():
    (first, second) = take(BatchLoader(stream(), SOURCES, 2, 3), 2)
    assert [m.pack_indices for m in first] == [(0, 1), (2, 3), (4, 5)]
    assert [m.pack_indices for m in second] == [(6, 7), (8, 9), (10, 11)]
    packs = stream()
    shown = [n for n in first[1].input_ids[0].unique_consecutive().tolist() if n]
    assert shown == [1000 * (s + 1) + i for s, i in packs[2]]


@pytest.mark.parametrize(("dp_size", "batch_size", "accumulation"), [(1, 2, 4), (2, 2, 2), (4, 2, 1), (4, 1, 2)])
def test_ranks_together_see_the_same_packs_in_a_step_whatever_their_number(dp_size, batch_size, accumulation):
    ranks = [
        take(BatchLoader(stream(), SOURCES, batch_size, accumulation, dp_rank=r, dp_size=dp_size), 3)
        for r in range(dp_size)
    ]
    for step in range(3):
        seen = [p for rank in ranks for m in rank[step] for p in m.pack_indices]
        assert sorted(seen) == list(range(8 * step, 8 * step + 8))
        micro = [[p for rank in ranks for p in rank[step][m].pack_indices] for m in range(accumulation)]
        assert [p for one in micro for p in one] == sorted(seen)  # a micro-batch of all ranks is consecutive


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_do_not_change_the_batches(workers):
    alone = take(BatchLoader(stream(), SOURCES, 2, 3), 12)
    assert same(alone, take(BatchLoader(stream(), SOURCES, 2, 3, num_workers=workers), 12))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_from_the_state_goes_on_exactly_there(workers):
    whole = take(BatchLoader(stream(), SOURCES, 2, 3, num_workers=workers), 10)
    for stop in (1, 4, 9):
        loader = BatchLoader(stream(), SOURCES, 2, 3, num_workers=workers)
        take(loader, stop)
        state = loader.state()
        assert state == {"packs": 6 * stop}
        resumed = BatchLoader(stream(), SOURCES, 2, 3, start_pack=state["packs"], num_workers=workers)
        assert same(take(resumed, 10 - stop), whole[stop:])


def test_another_number_of_ranks_resumes_the_same_global_order():
    loader = BatchLoader(stream(), SOURCES, 2, 4)
    take(loader, 3)
    start = loader.state()["packs"]
    ranks = [take(BatchLoader(stream(), SOURCES, 1, 2, dp_rank=r, dp_size=4, start_pack=start), 1) for r in range(4)]
    assert sorted(p for rank in ranks for m in rank[0] for p in m.pack_indices) == list(range(24, 32))


def test_prefetched_steps_do_not_count_as_consumed():
    loader = BatchLoader(stream(), SOURCES, 1, 1, num_workers=2, prefetch=4)
    steps = iter(loader)
    assert loader.state() == {"packs": 0}
    next(steps)
    time.sleep(0.05)
    assert loader.state() == {"packs": 1}
    steps.close()


def test_an_error_in_a_worker_reaches_the_consumer_after_the_steps_before_it():
    packs = stream()
    bad = next(p for p in range(3, 50) if (0, 33) in packs[p])
    loader = BatchLoader(packs, [Numbered(0, fails_at=33), SOURCES[1]], 1, num_workers=2)
    good = []
    with pytest.raises(OSError, match="disk is gone"):
        good.extend(step[0].pack_indices[0] for step in loader)
    assert good == list(range(bad))
    assert loader.state() == {"packs": bad}


def test_closing_joins_the_threads():
    before = threading.active_count()
    loader = BatchLoader(stream(), SOURCES, 1, num_workers=3)
    steps = iter(loader)
    next(steps)
    assert threading.active_count() > before
    loader.close()
    assert threading.active_count() == before


def test_an_evaluation_sees_every_sample_once_and_ends():
    bounded = stream(epochs=1, greedy=False)
    loader = BatchLoader(bounded, SOURCES, 2, 1, num_workers=2)
    expected = len(loader)
    steps = take(loader, None)
    assert len(steps) == expected == -(-len(bounded) // 2)
    assert [p for step in steps for p in step[0].pack_indices] == list(range(len(bounded)))
    assert sum(m.num_label_tokens for step in steps for m in step) == sum(
        LENGTHS[s][i] for pack in bounded for s, i in pack
    )


@pytest.mark.parametrize("dp_size", [2, 4])
def test_evaluation_ranks_make_equally_many_calls_and_count_each_token_once(dp_size):
    bounded = stream(epochs=1, greedy=False)
    ranks = [take(BatchLoader(bounded, SOURCES, 2, 3, dp_rank=r, dp_size=dp_size), None) for r in range(dp_size)]
    assert len({tuple(len(step) for step in rank) for rank in ranks}) == 1
    total = sum(m.num_label_tokens for rank in ranks for step in rank for m in step)
    assert total == sum(LENGTHS[s][i] for pack in bounded for s, i in pack)
    filler = [m for rank in ranks for step in rank for m in step if not m.num_label_tokens]
    assert all((m.labels == IGNORE).all() for m in filler)
