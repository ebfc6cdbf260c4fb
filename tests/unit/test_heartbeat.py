"""Beats: heard by the thread that listens, not by others; a thread that is waited for lends its own."""

from __future__ import annotations

import threading
import time

from erniekit import heartbeat
from support.clock import until


def test_a_listener_hears_its_own_thread_alone_and_only_while_it_listens() -> None:
    heard: list[int] = []
    with heartbeat.listening(lambda: heard.append(1)):
        other = threading.Thread(target=heartbeat.beat)
        other.start()
        other.join()
        assert heard == [], "a save in the background is no progress of the loop"
        assert list(heartbeat.each("ab")) == ["a", "b"]
        assert heard == [1, 1]
    heartbeat.beat()
    assert heard == [1, 1]


def test_waiting_for_a_thread_goes_on_as_long_as_it_makes_progress() -> None:
    heard: list[int] = []
    made: list[int] = []
    by_then: list[int] = []

    def work() -> None:
        for _ in range(5):
            made.append(1)
            heartbeat.beat()
            until(lambda: len(heard) >= len(made))
        time.sleep(0.1)
        by_then.append(len(heard))
        time.sleep(0.3)  # in which it makes none
        by_then.append(len(heard))

    thread = threading.Thread(target=work)
    thread.start()
    with heartbeat.listening(lambda: heard.append(1)):
        heartbeat.join(thread, every=0.02)
    assert not thread.is_alive()
    first, last = by_then
    assert first >= 5
    assert last == first, "a thread that stands still lends nothing"
