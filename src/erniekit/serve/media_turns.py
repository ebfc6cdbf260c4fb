"""Whose picture is decoded next: fair turns by client, then by request. Used by media_work.py.

A request's media are read one at a time and each waits for its turn, so that a request of many large pictures delays
others by one of them at most. No client has all decoders: one is left for the others.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from erniekit.data.media.decode import MediaHeader, Medium
from erniekit.serve.prompt_worker import Failed
from erniekit.serve.work_queue import Busy, QueuedTask

MEDIA_S = 60.0  # to read all media of a request, the waits for their turns included

SMALL = 20_000_000  # pixels of a request that goes before larger ones of its client: a few tenths of a second


@dataclass(frozen=True)
class MediaSettings:
    processes: int = 3
    queue: int = 16  # requests that may wait
    deadline_s: float = MEDIA_S
    pixels: int = 500_000_000  # of all pictures and frames that a request shows; each is held whole as it is scaled
    decoded: int = 40_000_000_000  # of a video up to the last frame that is shown: ten minutes in 1080p

    @property
    def of_one_client(self) -> int:
        """Decoders that one client may have at a time."""
        return max(1, self.processes - 1)


@dataclass(eq=False)
class MediaTurn:
    """A request whose media are being read."""

    client: str
    ends: float  # the deadline, on the monotonic clock
    number: int = 0  # in the order of arrival
    pixels: int = 0  # that are to be decoded, once their headers are read


@dataclass
class MediaTurns:
    settings: MediaSettings
    _requests: Counter[str] = field(default_factory=Counter)  # by client
    _served: dict[str, int] = field(default_factory=dict)  # client -> when it had its last turn
    _clock: int = 0
    _arrived: int = 0

    def enter(self, client: str, seconds: float) -> MediaTurn:
        """Raises Busy. Beyond the limit there is as much space again for clients that have nothing here: one client
        cannot fill the queue for the others."""
        most, here = self.settings.processes + self.settings.queue, self._requests.total()
        if here >= (2 * most if not self._requests[client] else most):
            raise Busy
        self._requests[client] += 1
        self._arrived += 1
        return MediaTurn(client, time.monotonic() + min(seconds, self.settings.deadline_s), self._arrived)

    def leave(self, turn: MediaTurn) -> None:
        self._requests[turn.client] -= 1
        if not self._requests[turn.client]:
            del self._requests[turn.client]
            self._served.pop(turn.client, None)

    def choose(self, waiting: Sequence[QueuedTask], running: Sequence[QueuedTask]) -> QueuedTask | None:
        """The client with the fewest decoders, among equals the one served longest ago. Of its requests the
        small ones, then the others; each kind as they came, since large ones in turns would all end too late. For a
        WorkQueue, under its lock."""
        busy = Counter(task.turn.client for task in running)
        eligible = [task for task in waiting if busy[task.turn.client] < self.settings.of_one_client]
        if not eligible:
            return None

        def order(task: QueuedTask) -> tuple[int, int, bool, int]:
            turn = task.turn
            return busy[turn.client], self._served.get(turn.client, 0), turn.pixels > SMALL, turn.number

        chosen = min(eligible, key=order)
        self._clock += 1
        self._served[chosen.turn.client] = self._clock
        return chosen


def pixels_of(medium: Medium, headers: Mapping[str, MediaHeader]) -> int:
    """That are shown: of its frames together."""
    found = [headers[place.path] for place in medium.places]
    return sum(header.width * header.height for header in found) * max(1, len(medium.frames))


def too_large(media: Sequence[Medium], headers: Mapping[str, MediaHeader], settings: MediaSettings) -> Failed | None:
    """What a decoder is not given, by the headers: nothing is decoded yet."""
    shown = 0
    for medium in media:
        place = medium.places[0]
        header = headers[place.path]
        length = max(medium.frames, default=-1) + 1
        if length * header.width * header.height > settings.decoded:
            what = f"{length:,} frames of {header.width:,} x {header.height:,} would have to be decoded"
            return Failed("media", what, code="too_many_frames", where=place.name)
        shown += pixels_of(medium, headers)
        if shown > settings.pixels:
            frames = f" in {len(medium.frames)} frames" if medium.frames else ""
            what = f"the request shows {shown:,} pixels{frames}; the limit is {settings.pixels:,}"
            return Failed("media", what, code="too_many_pixels", where=place.name)
    return None
