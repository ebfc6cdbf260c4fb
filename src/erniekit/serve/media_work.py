"""Media of requests: read by worker processes beside the event loop, bounded in number, in waiting and in time.

Used by api.py, through `read_vision`. A thread waits for each process; a decoder that hangs or dies is killed with its
process, and costs the request that sent the picture.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from erniekit.data.formats.fields import BadRow
from erniekit.data.media.decode import MediaHeader, Medium, ReadHeader, ReadPatches
from erniekit.data.media.limits import MediaError, MediaLimits
from erniekit.data.media.place import MediaPlace
from erniekit.data.media.worker import MediaWorker
from erniekit.data.vision.chat_rows import read_prompt
from erniekit.data.vision.rules import VisionRules
from erniekit.data.vision.said import VisionRow
from erniekit.data.vision.tokens import VisionPrompt
from erniekit.errors import ErnieKitError
from erniekit.serve.engines.vision_input import PAIR, FeatureCache, PromptVision
from erniekit.serve.prompt_work import LEFT_S, PromptLoad, PromptWork, QueuedTask, WorkQueue, registered, result_of
from erniekit.serve.prompt_worker import Failed, SeenChat
from erniekit.serve.request_parsing import ParsedRequest
from erniekit.serve.vision_prompt import VisionChat, medium_key, prompt_vision

MEDIA_S = 60.0  # to read all media of a request, once their turn has come and while they wait for it
Ask = Callable[[Any, str], Any]  # work and a name for messages -> its result


@dataclass(frozen=True)
class MediaSettings:
    processes: int = 2
    queue: int = 16  # requests that may wait
    deadline_s: float = MEDIA_S


@dataclass(frozen=True)
class ReadRow:
    """Messages with `data:` URLs -> the row, and the header of every source."""

    messages: list[dict[str, Any]]
    rules: VisionRules

    def read(self, ask: Ask) -> tuple[VisionRow, dict[str, MediaHeader]]:
        row = numbered(read_prompt(self.messages))
        limits = self.rules.limits
        headers = {
            place.path: ask(ReadHeader(replace(place, path=""), given.video and not given.stamps, limits), place.name)
            for given in row.media
            for place in given.sources
        }
        return row, headers


@dataclass(frozen=True)
class ReadPixels:
    media: Sequence[Medium]
    limits: MediaLimits

    def read(self, ask: Ask) -> list[np.ndarray]:
        return [ask(ReadPatches(medium, self.limits), medium.places[0].name) for medium in self.media]


class MediaProcess:
    """One worker process and the task it is at. One thread gives it work; `kill` may come from any."""

    def __init__(self, limits: MediaLimits) -> None:
        self.limits = limits
        self._worker = MediaWorker()
        self._task: QueuedTask | None = None
        self._lock = threading.Lock()
        registered(self)

    def do(self, task: QueuedTask) -> Any:
        with self._lock:
            self._task = task

        def ask(work: Any, name: str) -> Any:
            left = task.ends - time.monotonic()
            if left <= 0:
                raise MediaError("timeout", f"{name}: no time was left to read it")
            return self._worker.ask(work, replace(self.limits, total=min(self.limits.total, left)), name)

        try:
            return task.work.read(ask)
        except (BadRow, MediaError) as error:
            return Failed("media", error.reason)
        except ErnieKitError as error:  # an extra that is not installed
            return Failed("unable", f"{error.what}: {error.fix}")
        finally:
            with self._lock:
                self._task = None

    def kill(self, task: QueuedTask | None = None) -> None:
        with self._lock:
            if task is None or task is self._task:
                self._worker.kill()

    def stop(self) -> None:
        self._worker.stop()


@dataclass
class MediaReader:
    limits: MediaLimits
    settings: MediaSettings = field(default_factory=MediaSettings)
    abandoned: int = 0

    def __post_init__(self) -> None:
        s = self.settings
        self._queue = WorkQueue("media", s.processes, s.queue, self._do, self._leave, LEFT_S)
        self._own = threading.local()
        self._processes: list[MediaProcess] = []

    async def read(self, work: ReadRow | ReadPixels, seconds: float) -> Any:
        """What `work` gives, or Failed. Raises Busy, Late or Stuck."""
        loop = asyncio.get_running_loop()
        ends = time.monotonic() + min(seconds, self.settings.deadline_s)
        task = QueuedTask(work, None, loop, loop.create_future(), ends)
        try:
            return await result_of(self._queue, task)
        finally:
            self.abandoned += task.late

    def load(self) -> PromptLoad:
        running, waiting, lost = self._queue.counts()
        return PromptLoad(running, waiting, lost, False, self.abandoned)

    def end(self) -> None:
        for task in self._queue.end():
            task.settle(Failed("stopping", ""))
        for process in list(self._processes):
            process.kill()

    def _do(self, task: QueuedTask) -> Any:
        process = getattr(self._own, "process", None)
        if process is None:
            process = self._own.process = MediaProcess(self.limits)
            self._processes.append(process)
        task.process = process
        return process.do(task)

    def _leave(self) -> None:
        process = getattr(self._own, "process", None)
        if process is not None:
            self._processes.remove(process)
            process.stop()


def numbered(row: VisionRow) -> VisionRow:
    """Each source gets a path of its own, by which its header and its bytes are found again."""
    return replace(
        row,
        media=tuple(
            replace(given, sources=tuple(replace(place, path=f"{k}.{i}") for i, place in enumerate(given.sources)))
            for k, given in enumerate(row.media)
        ),
    )


def without_bytes(row: VisionRow) -> tuple[VisionRow, dict[str, MediaPlace]]:
    """The row for a process that makes ids, and what it was freed of, by path."""
    kept = {place.path: place for given in row.media for place in given.sources}
    media = tuple(
        replace(given, sources=tuple(replace(place, content=b"") for place in given.sources)) for given in row.media
    )
    return replace(row, media=media), kept


async def read_vision(
    parsed: ParsedRequest, prompts: PromptWork, media: MediaReader, features: FeatureCache, seconds: float
) -> tuple[list[int], PromptVision | None] | Failed:
    """Ids and pictures of a chat with a model that sees. Media whose features the engine keeps are not decoded."""
    served, work = parsed.served, parsed.work
    assert served.vision is not None
    assert isinstance(work, VisionChat)
    rules = served.vision.rules
    headers: dict[str, MediaHeader] = {}
    if work.media:
        found = await media.read(ReadRow(work.messages, rules), seconds)
        if isinstance(found, Failed):
            return found
        row, headers = found
    else:
        try:
            row = read_prompt(work.messages)
        except BadRow as error:
            return Failed("refused", error.reason)
    bare, kept = without_bytes(row)
    made = await prompts.ids(SeenChat(bare, headers, rules, work.thinking), served.tokenizer, parsed.most, seconds)
    if isinstance(made, Failed):
        return made
    asked: VisionPrompt = made[0]
    ids = asked.ids.tolist()
    if not asked.media.sources:
        return ids, None
    known = [features.all(served.name, medium_key(m), max(1, m.grid[0] // PAIR)) for m in asked.media.sources]
    missing = [
        replace(medium, places=tuple(replace(kept[place.path], path="") for place in medium.places))
        for medium, features_of in zip(asked.media.sources, known)
        if not features_of
    ]
    pixels = await media.read(ReadPixels(missing, rules.limits), seconds) if missing else []
    if isinstance(pixels, Failed):
        return pixels
    left = iter(pixels)
    patches = [None if features_of else next(left) for features_of in known]
    return ids, prompt_vision(asked, patches, served.tokenizer, rules, known)
