"""Decisions of all ranks with one rank alone; with several they are in tests/distributed/test_guards.py."""

from __future__ import annotations

from typing import Any

from erniekit.train.agreement import agree_on_stop, agree_on_stop_or_save


class Others:
    """This rank and what the others would have put into the next reduction."""

    rank = 0

    def __init__(self, *others: float) -> None:
        self.others, self.calls = list(others), 0

    @property
    def size(self) -> int:
        return 1 + len(self.others)

    def max(self, value: int) -> int:
        self.calls += 1
        return int(max([value, *self.others]))

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.others]


def test_any_ranks_signal_is_everyones() -> None:
    assert agree_on_stop(None, Others()) is None
    assert agree_on_stop("SIGUSR1", Others()) == "SIGUSR1"
    assert agree_on_stop(None, Others(0, 2)) == "SIGINT"
    assert agree_on_stop("SIGINT", Others(15)) == "SIGTERM"


def test_a_stop_and_a_save_by_time_are_agreed_on_together() -> None:
    assert agree_on_stop_or_save(None, False, Others()) == (None, False)
    assert agree_on_stop_or_save(None, True, Others(0)) == (None, True)
    assert agree_on_stop_or_save(None, False, Others(1)) == (None, True)
    assert agree_on_stop_or_save("SIGTERM", False, Others(1))[0] == "SIGTERM"
    assert agree_on_stop_or_save(None, True, Others(2 * 15))[0] == "SIGTERM"
    world = Others(0, 0)
    agree_on_stop_or_save(None, True, world)
    assert world.calls == 1
