"""Whose medium is decoded next: no client keeps others from the decoders, and what costs too much is known before."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from erniekit.data.media.decode import MediaHeader, Medium
from erniekit.data.media.limits import MediaLimits
from erniekit.data.media.place import MediaPlace
from erniekit.serve.engines.base import CLIENT
from erniekit.serve.media_turns import MediaSettings, MediaTurns, too_large
from erniekit.serve.media_work import MediaReader
from erniekit.serve.work_queue import Busy, QueuedTask
from support.clock import PATIENCE_S


@dataclass
class Held:
    """A decode that lasts until it is let go."""

    client: str
    at_work: list[str]  # clients whose decodes have begun
    go: threading.Event
    where: str = "messages[0].content[0]"

    def read(self, ask: Any) -> str:
        self.at_work.append(self.client)
        assert self.go.wait(PATIENCE_S)
        return self.client


async def asks(media: MediaReader, client: str, *works: Any) -> list[Any]:
    """One request."""
    CLIENT.set(client)
    with media.turn(PATIENCE_S) as turn:
        return [await media.read(work, turn) for work in works]


def test_a_client_with_many_large_pictures_leaves_a_decoder_to_the_others() -> None:
    async def run() -> None:
        media = MediaReader(MediaLimits(), MediaSettings(processes=3, queue=16))
        begun: list[str] = []
        never, at_once = threading.Event(), threading.Event()
        at_once.set()
        try:
            greedy = [
                asyncio.create_task(asks(media, "greedy", *[Held("greedy", begun, never)] * 4)) for _ in range(12)
            ]
            while len(begun) < 2:
                await asyncio.sleep(0.001)
            for _ in range(5):  # each as if nobody else were there
                assert await asks(media, "small", Held("small", begun, at_once)) == ["small"]
            assert Counter(begun) == {"greedy": 2, "small": 5}
            never.set()
            assert await asyncio.gather(*greedy) == [["greedy"] * 4] * 12
        finally:
            never.set()
            media.end()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_of_one_client_small_requests_go_first_and_large_ones_as_they_came() -> None:
    turns = MediaTurns(MediaSettings(processes=1))
    large, other, small = waiting = [QueuedTask(None, None, None, None, 0, turn=turns.enter("one", 9)) for _ in "abc"]
    large.turn.pixels, other.turn.pixels = 400_000_000, 30_000_000
    assert turns.choose([other, large, small], []) is small
    assert turns.choose([other, large], []) is large
    assert turns.choose(waiting, [small]) is None, "its one decoder is at work"


def test_clients_take_turns() -> None:
    turns = MediaTurns(MediaSettings(processes=4))
    tasks = {name: QueuedTask(None, None, None, None, 0, turn=turns.enter(name[0], 9)) for name in ("a1", "a2", "b1")}
    chosen = [turns.choose(list(tasks.values()), [])]
    chosen.append(turns.choose([task for task in tasks.values() if task not in chosen], []))
    assert chosen == [tasks["a1"], tasks["b1"]]
    assert turns.choose([tasks["a2"], tasks["b1"]], [tasks["a1"]]) is tasks["b1"], "it has no decoder yet"


def test_one_client_cannot_fill_the_queue_for_the_others() -> None:
    turns = MediaTurns(MediaSettings(processes=1, queue=2))
    entered = [turns.enter("greedy", 60) for _ in range(3)]
    with pytest.raises(Busy):
        turns.enter("greedy", 60)
    other = turns.enter("other", 60)
    with pytest.raises(Busy):  # beyond the limit, and it has one
        turns.enter("other", 60)
    for turn in (*entered, other):
        turns.leave(turn)
    assert turns.enter("greedy", 60).client == "greedy"


def medium(name: str, *frames: int) -> Medium:
    return Medium((MediaPlace(path=name, label=f"messages[0].content[{name}]"),), (1, 2, 2), bool(frames), frames)


@pytest.mark.parametrize(
    ("media", "size", "code"),
    [
        ([medium("0")], (9_999, 9_999), ""),
        ([medium(str(k)) for k in range(16)], (9_999, 9_999), "too_many_pixels"),
        ([medium("0", *range(0, 40, 2))], (6_000, 6_000), "too_many_pixels"),
        ([medium("0", *range(0, 40_000, 2_000))], (1_920, 1_080), "too_many_frames"),
        ([medium("0", *range(0, 14_000, 70))], (1_920, 1_080), ""),
    ],
)
def test_what_costs_too_much_is_refused_by_frames_and_pixels_before_it_is_decoded(
    media: list[Medium], size: tuple[int, int], code: str
) -> None:
    headers = {place.path: MediaHeader(*size, digest="") for one in media for place in one.places}
    found = too_large(media, headers, MediaSettings())
    assert (found.code if found else "") == code
    assert found is None or found.where.startswith("messages[0].content[")
