"""When ranks compute, transfer and wait, on traces written down here whose times are known."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from erniekit.rehearse.calls import Call, RankGroup, Trace
from erniekit.rehearse.moments import CountedWork, Moments
from erniekit.rehearse.timing import RankTimes, TimeSpan, duration, slowest, timed, volume

PAIR, OTHERS = RankGroup((0, 1)), RankGroup((0, 1), 1)
EIGHT = RankGroup(tuple(range(8)))
SECOND = 250  # floats of an all_reduce of two ranks that take one: 2 * 1/2 * 4 bytes each, at 1000 bytes a second


class Plain:
    """A FLOP takes a second, a transfer no latency; 1000 bytes a second in a machine of eight, 100 between two."""

    latency = 0.0

    def seconds(self, rank: int, work: CountedWork) -> float:
        return work.products

    def link(self, members: Sequence[int]) -> float:
        return 1000.0 if max(members) // 8 == min(members) // 8 else 100.0


class Recorder(Trace):
    """A trace that is written in seconds."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, moments=Moments())
        self.moments.begin()

    def computes(self, seconds: float) -> Recorder:
        self.moments.work.products += seconds
        return self

    def sums(self, seconds: float, group: RankGroup = PAIR) -> int:
        return self.start(Call("all_reduce", group, (int(seconds * SECOND),), "float32"))


def ranks(*traces: Recorder) -> dict[int, RankTimes]:
    for trace in traces:
        trace.moments.end()
    return timed({trace.rank: trace for trace in traces}, Plain())


def pair(*seconds: float) -> tuple[Recorder, Recorder]:
    """Each computes so long first."""
    return Recorder(0).computes(seconds[0]), Recorder(1).computes(seconds[-1])


def figures(one: RankTimes) -> tuple[float, ...]:
    return one.step, one.computed, one.communication, one.hidden, one.exposed, one.waiting


def test_a_sum_that_is_waited_for_after_more_computation_is_hidden() -> None:
    both = pair(1.0)
    for trace in both:
        number = trace.sums(2.0)
        trace.computes(3.0).wait(number)
        trace.computes(1.0)
    for one in ranks(*both).values():
        assert figures(one) == (5, 5, 2, 2, 0, 0)
        assert one.computing == [TimeSpan(0, 5)]
        assert [(s.start, s.end, s.what) for s in one.transfers] == [(1, 3, "all_reduce")]


def test_a_sum_that_takes_longer_than_what_is_computed_meanwhile_is_half_hidden() -> None:
    both = pair(1.0)
    for trace in both:
        number = trace.sums(4.0)
        trace.computes(2.0).wait(number)
        trace.computes(1.0)
    for one in ranks(*both).values():
        assert figures(one) == (6, 4, 4, 2, 2, 0)
        assert one.stalls() == [TimeSpan(3, 5)]


def test_a_sum_that_is_waited_for_at_once_is_not_hidden() -> None:
    both = pair(1.0)
    for trace in both:
        trace.wait(trace.sums(2.0))
        trace.computes(3.0)
    for one in ranks(*both).values():
        assert figures(one) == (6, 4, 2, 0, 2, 0)


def test_a_rank_waits_for_its_slower_partner_which_is_the_slowest() -> None:
    both = pair(1.0, 4.0)
    for trace in both:
        trace.wait(trace.sums(2.0))
    found = ranks(*both)
    assert figures(found[0]) == (6, 1, 2, 0, 2, 3)
    assert figures(found[1]) == (6, 4, 2, 0, 2, 0)
    assert slowest(found.values()).rank == 1


def test_two_groups_transfer_at_once_and_one_group_one_after_the_other() -> None:
    for second, end in ((OTHERS, 2.0), (PAIR, 4.0)):
        both = pair(0.0)
        for trace in both:
            numbers = trace.sums(2.0), trace.sums(2.0, second)
            for number in numbers:
                trace.wait(number)
        for one in ranks(*both).values():
            assert (one.step, one.communication) == (end, end)


def test_a_call_on_another_stream_begins_when_that_stream_comes_to_it() -> None:
    """As fully_shard gathers the next layer: its stream waits for nothing that is computed in between."""
    both = pair(1.0)
    for trace in both:
        here = trace.moments.record(0)
        trace.computes(5.0)
        trace.moments.after(1, here)
        before = trace.moments.switch(1)
        trace.wait(trace.sums(2.0))
        event = trace.moments.record(1)
        trace.moments.switch(before)
        trace.moments.after(0, event)
        trace.computes(1.0)
    for one in ranks(*both).values():
        assert [(s.start, s.end) for s in one.transfers] == [(1, 3)]
        assert figures(one) == (7, 7, 2, 2, 0, 0)


def test_what_is_computed_on_the_stream_of_transfers_is_communication() -> None:
    one = Recorder(0).computes(1.0)
    before = one.moments.switch(1)
    one.computes(3.0)
    event = one.moments.record(1)
    one.moments.switch(before)
    one.moments.after(0, event)
    assert figures(ranks(one)[0]) == (3, 1, 3, 1, 2, 0)


def test_a_message_is_under_way_when_both_ends_are_there() -> None:
    both = pair(1.0, 3.0)
    both[0].wait(both[0].start(Call("send", PAIR, (500,), "float32", peer=1)))
    both[1].wait(both[1].start(Call("recv", PAIR, (500,), "float32", peer=0)))
    found = ranks(*both)
    assert [(s.start, s.end) for s in found[0].transfers] == [(3, 5)]
    assert found[0].waiting == 2


def test_calls_before_the_step_are_not_of_it() -> None:
    both = Recorder(0), Recorder(1)
    for trace in both:
        trace.moments.on = False
        trace.wait(trace.sums(9.0))
        trace.moments.begin()
        trace.wait(trace.sums(2.0))
    assert ranks(*both)[0].step == 2


def test_ranks_that_wait_for_ever_are_refused() -> None:
    alone = Recorder(0)
    alone.wait(alone.sums(1.0))
    with pytest.raises(ValueError, match="for ever"):
        ranks(alone, Recorder(1))


def test_thousands_of_ranks_in_large_groups_take_seconds() -> None:
    """In proportion to the calls."""
    stages = [RankGroup(tuple(range(first, first + 168))) for first in range(0, 2016, 168)]
    traces = [Recorder(rank) for rank in range(2016)]
    for trace in traces:
        for _ in range(20):
            trace.wait(trace.computes(1.0).sums(1.0, stages[trace.rank // 168]))
    began = time.process_time()
    assert slowest(ranks(*traces).values()).computed == 20
    assert time.process_time() - began < 10  # 0.6 s on a free core of two


@pytest.mark.parametrize(
    ("call", "sent"),
    [
        (Call("all_reduce", EIGHT, (80,), "float32"), 2 * 7 / 8 * 320),
        (Call("all_gather", EIGHT, (10,), "bfloat16"), 7 * 20),
        (Call("reduce_scatter", EIGHT, (10,), "float32"), 7 * 40),
        (Call("all_to_all", EIGHT, (16, 5), "bfloat16", sent=(9, *(1,) * 7), got=(2,) * 8), 14 * 10),
        (Call("broadcast", EIGHT, (10,), "float8_e4m3fn"), 10),
        (Call("send", EIGHT, (10, 2), "float32", peer=3), 80),
        (Call("barrier", EIGHT), 0),
    ],
    ids=lambda value: value.op if isinstance(value, Call) else "",
)
def test_bytes_over_a_link(call: Call, sent: float) -> None:
    assert volume(0, call) == sent


def test_a_group_that_spans_machines_has_the_slower_link_and_one_of_one_rank_none() -> None:
    call = Call("all_gather", RankGroup((7, 8)), (1000,), "bfloat16")
    assert duration(7, call, Plain()) == 20
    assert duration(7, Call("send", EIGHT, (1000,), "bfloat16", peer=2), Plain()) == 2
    assert duration(0, Call("all_reduce", RankGroup((0,)), (1000,), "float32"), Plain()) == 0


@pytest.mark.parametrize("seed", range(20))
def test_of_any_run_the_parts_add_up(seed: int) -> None:
    rng = random.Random(seed)
    groups = [RankGroup((0, 1, 2, 3)), RankGroup((0, 1, 2, 3), 1), RankGroup((0, 1)), RankGroup((2, 3))]
    traces = [Recorder(rank) for rank in range(4)]
    pending: dict[int, list[int]] = {rank: [] for rank in range(4)}
    for _ in range(30):
        group, size, blocks = rng.choice(groups), rng.random() * 3, rng.random() < 0.4
        for rank in group.members:
            trace = traces[rank]
            number = trace.computes(rng.random()).sums(size, group)
            pending[rank].append(number)
            if blocks:
                trace.wait(number)
            elif rng.random() < 0.3:
                trace.wait(rng.choice(pending[rank]))
    found = ranks(*traces)
    step = max(one.end for one in found.values())
    for one in found.values():
        assert one.step == step >= one.computed
        assert one.hidden + one.exposed == pytest.approx(one.communication)
        assert one.computed + one.exposed + one.waiting == pytest.approx(one.step)
        assert 0 <= one.hidden <= min(one.computed, one.communication) + 1e-9
        assert sum(s.end - s.start for s in one.stalls()) == pytest.approx(one.step - one.computed)
