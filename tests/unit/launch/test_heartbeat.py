"""Heartbeats of launchers through a real store, and what a silent network does to a socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from erniekit.launch import heartbeat
from erniekit.launch.heartbeat import Heartbeat, Machine, newest_checkpoint, notice_silence
from support.clock import Clock, until


@pytest.fixture
def pulse(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, str], Heartbeat]]:
    """pulse(number, launcher): one of two machines, announced; each has a connection of its own."""
    monkeypatch.setattr(heartbeat, "BEAT_INTERVAL_S", 0.05)
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    made: list[Heartbeat] = []

    def make(number: int, launcher: str) -> Heartbeat:
        own = TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
        made.append(Heartbeat(own, number, 2, launcher))
        made[-1].announce(0)
        return made[-1]

    yield make
    for one in made:
        one.close()
    no_pulse()  # no thread may be inside a store that is taken down


def no_pulse() -> None:
    """Returns when no thread beats or listens any more."""
    until(lambda: not any(thread.name == "pulse" for thread in threading.enumerate()))


def hear(clock: Clock, *pulses: Heartbeat) -> None:
    """Seconds pass, in each tenth of which all of these hear a beat of the other machine."""
    for _ in range(20):
        clock.sleep(0.1)
        until(lambda: all(one._changed_at[1 - one.me] == clock.now for one in pulses))


def listen(clock: Clock, seconds: float, one: Heartbeat) -> None:
    """So much time passes at once, and then it looks."""
    clock.sleep(seconds)
    until(lambda: one._looked == clock.now)


def test_a_launcher_that_stops_beating_is_silent_and_one_that_beats_is_not(pulse: Callable, clock: Clock) -> None:
    one, two = pulse(0, "a"), pulse(1, "b")
    one.start()
    two.start()
    hear(clock, one, two)
    assert one.silent(0.4) == []
    assert two.silent(0.4) == []
    two.close()
    until(lambda: sum(thread.name == "pulse" for thread in threading.enumerate()) == 1)
    listen(clock, 0.2, one)
    assert one.silent(0.4) == []
    listen(clock, 10, one)
    assert one.silent(0.4) == [1]
    assert one.replaced() == []


def test_a_launcher_whose_ranks_have_finished_may_be_silent(pulse: Callable, clock: Clock) -> None:
    one, two = pulse(0, "a"), pulse(1, "b")
    one.start()
    two.start()
    two.done()
    until(lambda: one._beats[1].endswith(heartbeat.DONE))
    two.close()
    listen(clock, 10, one)
    assert one.silent(0.2) == []


def test_another_launcher_under_the_same_number_is_noticed(pulse: Callable) -> None:
    one, _ = pulse(0, "a"), pulse(1, "b")
    one.start()
    pulse(1, "c")
    until(lambda: one.replaced() == [1])


def test_one_that_hears_nothing_at_all_blames_nobody(pulse: Callable, clock: Clock) -> None:
    """Its own connection is the one that is gone: the agent says so."""
    one, _ = pulse(0, "a"), pulse(1, "b")
    one.start()
    one.close()
    no_pulse()
    clock.sleep(10)
    assert one.silent(0.2) == []


def test_connections_to_the_meeting_point_get_a_time_limit_and_others_do_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as meeting, socket.create_server(("127.0.0.1", 0)) as other:
        ours, theirs = (socket.create_connection(s.getsockname()) for s in (meeting, other))
        with ours, theirs:
            notice_silence(meeting.getsockname()[1])
            kept = [s.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for s in (ours, theirs)]
            limits = [s.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for s in (ours, theirs)]
            idle = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            every, count = (ours.getsockopt(socket.IPPROTO_TCP, o) for o in (socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT))
    assert kept == [1, 0]
    assert limits == [heartbeat.LOST_S * 1000, 0]
    assert idle + every * count == heartbeat.LOST_S


def test_a_machine_is_named_by_number_host_address_and_ranks() -> None:
    machine = Machine(1, 2, "box", "10.0.0.2", (8, 9, 10))
    assert str(machine) == "machine 1 of 2, box (10.0.0.2), ranks 8 to 10"
    assert str(Machine(0, 1, "box", "::1", (0,))) == "machine 0 of 1, box (::1), rank 0"
    assert Machine.from_json(machine.to_json()) == machine


def test_the_newest_checkpoint_is_the_highest_step_that_is_whole(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none") == ""
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11", "checkpoint-12.aside-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "MANIFEST.json").touch()
    (tmp_path / "checkpoint-11" / "MANIFEST.json").unlink()
    assert newest_checkpoint(tmp_path) == "checkpoint-10"
