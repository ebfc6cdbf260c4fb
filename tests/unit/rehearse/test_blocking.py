"""Ranks that wait in a circle, and those that do not, on lists of calls written down here."""

from __future__ import annotations

import time

from erniekit.rehearse.blocking import deadlock
from erniekit.rehearse.calls import Call, RankGroup, Trace

PAIR = RankGroup((0, 1))


def message(op: str, peer: int, tag: int = 0) -> Call:
    return Call(op, PAIR, (4,), "float32", peer=peer, tag=tag, source=f"here.py:{peer}")


def traces(*calls: tuple[Call, ...]) -> dict[int, Trace]:
    """One rank for each, which waits for every call before the next."""
    made = {rank: Trace(rank) for rank in range(len(calls))}
    for rank, own in enumerate(calls):
        for call in own:
            made[rank].blocking(call)
    return made


def test_two_that_both_send_first_wait_for_each_other() -> None:
    found = deadlock(traces((message("send", 1), message("recv", 1)), (message("send", 0), message("recv", 0))))
    assert found is not None
    assert found.ranks == (0, 1)
    assert found.lines[0].startswith("rank 0 waits for rank 1: send")


def test_one_that_receives_first_frees_both() -> None:
    assert deadlock(traces((message("send", 1), message("recv", 1)), (message("recv", 0), message("send", 0)))) is None


def test_a_started_message_is_waited_for_later() -> None:
    made = traces((), ())
    for rank, trace in made.items():
        started = [trace.start(message(op, 1 - rank)) for op in ("send", "recv")]
        for number in started:
            trace.wait(number)
    assert deadlock(made) is None


def test_messages_of_another_tag_do_not_count() -> None:
    found = deadlock(traces((message("send", 1, tag=3),), (message("recv", 0, tag=4),)))
    assert found is not None
    assert found.ranks == (0, 1)


def test_a_member_that_ends_early_is_named() -> None:
    both = RankGroup((0, 1, 2))
    twice = (Call("all_reduce", both, (1,), "float32"),) * 2
    found = deadlock(traces(twice, twice, twice[:1]))
    assert found is not None
    assert found.ranks == (0, 1)
    assert "waits for rank 2 (which has ended)" in found.lines[0]


def test_thousands_of_ranks_in_large_groups_take_seconds() -> None:
    """In proportion to the calls, not to the pairs of ranks: 2,016 ranks in groups of 168 took minutes."""
    stages = [RankGroup(tuple(range(first, first + 168))) for first in range(0, 2016, 168)]
    made = traces(*((Call("all_gather", stages[rank // 168], (5,), "bfloat16"),) * 20 for rank in range(2016)))
    began = time.process_time()
    assert deadlock(made) is None
    assert time.process_time() - began < 5  # 0.3 s on a free core of two
