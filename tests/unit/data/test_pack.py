"""Packs: nothing lost, nothing too long, any pack by its number."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.data.mix import SampleOrder
from erniekit.data.pack import PackStream, fill_greedy, fill_in_order
from erniekit.errors import DataError
from support.clock import within

MODES = [{"greedy": True}, {"greedy": False}, {"packing": False}]
streams = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=120), min_size=1, max_size=3),
        "mode": st.sampled_from(MODES),
        "buffer_size": st.integers(1, 40),
        "strategy": st.sampled_from(["random", "concat", "interleave_over"]),
        "shuffle": st.booleans(),
    }
)


def build(spec, **options):
    lengths = [np.array(one, dtype=np.int32) for one in spec["lengths"]]
    probs = [0.5, 0.3, 0.2][: len(lengths)]
    order = SampleOrder(
        [len(one) for one in lengths], probs, seed=3, shuffle=spec["shuffle"], strategy=spec["strategy"]
    )
    return PackStream(order, lengths, 100, buffer_size=spec["buffer_size"], **spec["mode"], **options)


@settings(max_examples=60, deadline=None)
@given(spec=streams, epochs=st.integers(1, 3))
def test_packs_hold_exactly_the_samples_of_the_epochs_and_never_too_many_tokens(spec, epochs):
    stream = build(spec, epochs=epochs)
    packs = list(stream)
    assert len(packs) == len(stream) == stream.count_packs(epochs)
    for pack in packs:
        assert pack
        assert sum(stream.lengths[s][i] for s, i in pack) <= 100
    source, index = stream.order.take(0, epochs * stream.order.epoch_size())
    assert sorted(m for pack in packs for m in pack) == sorted(zip(source.tolist(), index.tolist()))


@settings(max_examples=30, deadline=None)
@given(spec=streams, data=st.data())
def test_any_pack_is_found_by_its_number_alone(spec, data):
    stream = build(spec, epochs=3)
    packs = list(stream)
    start = data.draw(st.integers(0, len(packs) - 1))
    fresh = build(spec)  # endless, and never asked for what came before
    assert [fresh[p] for p in range(start, len(packs))] == packs[start:]
    assert build(spec, epochs=3)[start] == packs[start]


@settings(max_examples=30, deadline=None)
@given(spec=streams)
def test_no_pack_mixes_two_epochs(spec):
    stream = build(spec)
    first, second = stream.count_packs(1), stream.count_packs(2)
    members = sorted(m for p in range(first, second) for m in stream[p])
    size = stream.order.epoch_size()
    source, index = stream.order.take(size, size)
    assert members == sorted(zip(source.tolist(), index.tolist()))


def test_greedy_fills_the_pack_with_the_most_room():
    # 60 | 50 opens another | 30 goes where 50 left 50, not where 60 left 40 | 40 back to the first | 25 opens a third
    assert fill_greedy([60, 50, 30, 40, 25], 100) == [0, 1, 1, 0, 2]
    assert fill_greedy([50, 60, 50, 20], 100) == [0, 1, 0, 1]
    assert fill_greedy([40, 70, 30, 30], 100) == [0, 1, 0, 0]  # equal room (30, 30): the first of them


def test_in_order_cuts_where_the_next_sample_does_not_fit():
    assert fill_in_order([60, 40, 1, 99, 100, 5], 100) == [0, 0, 1, 1, 2, 3]


def test_one_very_long_pack_of_tiny_samples_is_not_cut_by_the_window():
    lengths = [np.ones(5000, dtype=np.int32)]
    stream = PackStream(SampleOrder([5000], shuffle=False), lengths, 4000, greedy=False, buffer_size=10, epochs=1)
    assert [len(pack) for pack in stream] == [4000, 1000]


def test_a_fraction_of_an_epoch_counts_its_part():
    lengths = [np.full(1000, 50, dtype=np.int32)]
    stream = PackStream(SampleOrder([1000], seed=1), lengths, 100)
    assert (stream.count_packs(1), stream.count_packs(0.5), stream.count_packs(2.5)) == (500, 250, 1250)


def test_very_many_epochs_are_estimated_from_the_first():
    lengths = [np.full(1000, 50, dtype=np.int32)]
    stream = PackStream(SampleOrder([1000], seed=1), lengths, 100)
    assert stream.count_packs(1_000_000) == 500 * 1_000_000


def test_an_endless_stream_has_no_length():
    stream = PackStream(SampleOrder([3]), [np.array([1, 2, 3])], 10)
    with pytest.raises(TypeError):
        len(stream)
    assert stream[3000]


def test_a_sample_longer_than_a_pack_is_refused():
    with pytest.raises(DataError, match="max_seq_len=64"):
        PackStream(SampleOrder([2]), [np.array([5, 65])], 64)


def test_skipping_a_million_samples_takes_under_two_seconds():
    lengths = [np.random.RandomState(0).randint(10, 400, 1_000_000).astype(np.int32)]
    stream = PackStream(SampleOrder([1_000_000], seed=3), lengths, 8192)
    began = time.process_time()
    last = stream.count_packs(1) - 1
    assert len(stream[last]) > 0
    assert within(time.process_time() - began, 2)  # CPU seconds; 0.6 measured
