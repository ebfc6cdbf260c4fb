"""Media of requests: read by worker processes outside the event loop, bounded in number, in waiting and in time.

Used by api.py, through `read_vision`. A thread waits for each process; a decoder that hangs or dies is killed with its
process, and only the request that sent the picture fails. media_turns.py chooses which medium is next.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from erniekit.data.formats.fields import BadRow
from erniekit.data.media.decode import MediaHeader, ReadHeader, ReadPatches
from erniekit.data.media.limits import MediaError, MediaLimits
from erniekit.data.media.place import MediaPlace
from erniekit.data.media.worker import MediaWorker
from erniekit.data.vision.chat_rows import read_prompt
from erniekit.data.vision.tokens import VisionPrompt
from erniekit.data.vision.vision_row import VisionRow
from erniekit.errors import ErnieKitError
from erniekit.serve.engines.base import CLIENT
from erniekit.serve.engines.vision_input import PAIR, FeatureCache, PromptVision
from erniekit.serve.media_turns import MediaSettings, MediaTurn, MediaTurns, pixels_of, too_large
from erniekit.serve.prompt_work import PromptLoad, PromptWork
from erniekit.serve.prompt_worker import Failed, SeenChat
from erniekit.serve.request_parsing import ParsedRequest
from erniekit.serve.vision_prompt import VisionChat, medium_key, prompt_vision
from erniekit.serve.work_queue import LEFT_S, QueuedTask, WorkQueue, result_of
from erniekit.serve.worker_process import registered

RunWork = Callable[[Any, str], Any]  # work and a name for messages -> its result


@dataclass(frozen=True)
class ReadRow:
    """Messages with `data:` URLs -> the row, its bytes decoded from base64."""

    messages: list[dict[str, Any]]
    where: str = "messages"

    def read(self, run_work: RunWork) -> VisionRow:
        return numbered(read_prompt(self.messages))


@dataclass(frozen=True)
class ReadMedium:
    """The header or the patches of one medium."""

    work: ReadHeader | ReadPatches
    where: str  # in the request

    def read(self, run_work: RunWork) -> Any:
        return run_work(self.work, self.where)


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

        def run_work(work: Any, name: str) -> Any:
            left = task.ends - time.monotonic()
            if left <= 0:
                raise MediaError("timeout", f"{name}: no time was left to read it")
            return self._worker.run(work, replace(self.limits, total=min(self.limits.total, left)), name)

        try:
            return task.work.read(run_work)
        except (BadRow, MediaError) as error:
            return Failed("media", error.reason, code=error.kind, where=task.work.where)
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
        self._turns = MediaTurns(s)
        capacity = 2 * (s.processes + s.queue)  # `turns` counts requests, and each has one piece of work here at a time
        self._queue = WorkQueue("media", s.processes, capacity, self._do, self._leave, LEFT_S, self._turns.choose)
        self._own = threading.local()
        self._processes: list[MediaProcess] = []

    @contextmanager
    def turn(self, seconds: float) -> Iterator[MediaTurn]:
        """Of the current request. Raises Busy."""
        turn = self._turns.enter(CLIENT.get(), seconds)
        try:
            yield turn
        finally:
            self._turns.leave(turn)

    async def read(self, work: ReadRow | ReadMedium, turn: MediaTurn) -> Any:
        """What `work` gives, or Failed. Raises Late or Stuck."""
        loop = asyncio.get_running_loop()
        task = QueuedTask(work, None, loop, loop.create_future(), turn.ends, turn=turn)
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
    """Ids and pictures of a chat with a vision-language model. Media with cached features are not decoded."""
    work = parsed.work
    assert isinstance(work, VisionChat)
    if work.media:
        with media.turn(seconds) as turn:
            return await _read_media(parsed, work, prompts, media, features, turn)
    try:
        row = read_prompt(work.messages)
    except BadRow as error:
        return Failed("refused", error.reason)
    made = await _ids(parsed, row, {}, work.thinking, prompts, seconds)
    return made if isinstance(made, Failed) else (made.ids.tolist(), None)


async def _ids(
    parsed: ParsedRequest,
    row: VisionRow,
    headers: dict[str, MediaHeader],
    thinking: bool | None,
    prompts: PromptWork,
    seconds: float,
) -> VisionPrompt | Failed:
    served = parsed.served
    assert served.vision is not None
    chat = SeenChat(row, headers, served.vision.rules, thinking)
    made = await prompts.ids(chat, served.tokenizer, parsed.most, seconds)
    if isinstance(made, Failed):
        return made
    parsed.check_room(len(made[0].ids))  # before anything is decoded
    return made[0]


async def _read_media(
    parsed: ParsedRequest,
    work: VisionChat,
    prompts: PromptWork,
    media: MediaReader,
    features: FeatureCache,
    turn: MediaTurn,
) -> tuple[list[int], PromptVision | None] | Failed:
    served = parsed.served
    assert served.vision is not None
    rules = served.vision.rules
    row = await media.read(ReadRow(work.messages), turn)
    if isinstance(row, Failed):
        return row
    headers: dict[str, MediaHeader] = {}
    for given in row.media:
        for place in given.sources:
            header = ReadHeader(replace(place, path=""), given.video and not given.stamps, rules.limits)
            found = await media.read(ReadMedium(header, place.name), turn)
            if isinstance(found, Failed):
                return found
            headers[place.path] = found
    bare, kept = without_bytes(row)
    prompt = await _ids(parsed, bare, headers, work.thinking, prompts, turn.ends - time.monotonic())
    if isinstance(prompt, Failed):
        return prompt
    sources = prompt.media.sources
    if not sources:
        return prompt.ids.tolist(), None
    known = [features.all(served.name, medium_key(m), max(1, m.grid[0] // PAIR)) for m in sources]
    missing = [medium for medium, features_of in zip(sources, known) if not features_of]
    if refused := too_large(missing, headers, media.settings):
        return refused
    turn.pixels = sum(pixels_of(medium, headers) for medium in missing)
    patches: list[Any] = []
    for medium, features_of in zip(sources, known):
        pixels = None
        if not features_of:
            whole = replace(medium, places=tuple(replace(kept[place.path], path="") for place in medium.places))
            pixels = await media.read(ReadMedium(ReadPatches(whole, rules.limits), whole.places[0].name), turn)
            if isinstance(pixels, Failed):
                return pixels
        patches.append(pixels)
    return prompt.ids.tolist(), prompt_vision(prompt, patches, served.tokenizer, rules, known)
