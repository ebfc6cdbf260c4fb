"""What launchers tell each other through a real store; when time passes is for the test to say."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from torch.distributed import TCPStore

from erniekit.launch import heartbeat, nodes
from erniekit.launch.failure import CRASH, Failure
from erniekit.launch.heartbeat import Heartbeat, Machine
from erniekit.launch.nodes import Nodes
from erniekit.launch.plan import LaunchPlan
from support.clock import Clock

BROKEN = Failure(0, 1, CRASH, ("error: Connection closed by peer",), peer=True)


@pytest.fixture
def pair(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Nodes]]:
    """The launchers of two machines that have agreed on attempt 0. They beat and listen when the test says so."""
    monkeypatch.setattr(Heartbeat, "_run", lambda self: None)
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    launch = LaunchPlan(1, nnodes=2, port=server.port, join_timeout_s=60.0)
    made = []
    for number in range(2):
        own = TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
        me = Machine(number, 2, socket.gethostname(), "127.0.0.1", (number,))
        made.append(Nodes(own, me, replace(launch, node_rank=number), f"launcher-{number}"))
    threads = [threading.Thread(target=one.agree, args=(0, 60.0)) for one in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield made
    del server  # it lives as long as they need it


class StandsStill(Clock):
    """Of the thread that waits: fifteen seconds are lost at its first sleep; from then on the other one listens."""

    def __init__(self, listener: Clock, look: Callable[[], None]) -> None:
        super().__init__(listener.now)
        self.listener, self.look, self.lost = listener, look, False

    def time(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        if not self.lost:
            self.now, self.lost = self.now + 15, True
            return
        self.now += heartbeat.BEAT_INTERVAL_S
        self.listener.now = self.now
        self.look()


def test_a_launcher_that_stood_still_listens_before_it_says_what_happened(
    pair: list[Nodes], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other machine is lost, which is why the rank here says that its peer is gone."""
    here, other = (one._heartbeat for one in pair)
    assert here is not None
    assert other is not None
    other.store.set("beat/0/1", "launcher-1:1")  # its last, not heard yet
    monkeypatch.setattr(nodes, "time", StandsStill(clock, here._look))
    told = pair[0].publish(BROKEN)
    assert told.lost == (1,)
    assert told.lines[0].startswith("error: lost: machine 1 of 2, ")
