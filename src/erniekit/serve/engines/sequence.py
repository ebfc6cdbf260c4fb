"""One answer in the engine: its tokens, its cache blocks and how far it is. Used by embedded.py and fair_queue.py."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from erniekit.serve.engines.base import Job, Stream
from erniekit.serve.engines.choose import Row


@dataclass(eq=False)
class Running:
    stream: Stream
    number: int  # of its job in the stream
    loop: asyncio.AbstractEventLoop | None  # None: nobody listens
    ids: list[int]
    luck: random.Random
    table: list[int] = field(default_factory=list)
    cached: int = 0  # positions whose keys and values are in the cache
    gone: bool = False  # cancelled, or done
    preempted: bool = False  # it has made room for another request once, and does not again

    @property
    def job(self) -> Job:
        return self.stream.jobs[self.number]

    @property
    def said(self) -> list[int]:
        return self.ids[len(self.job.prompt) :]

    @property
    def client(self) -> str:
        return self.stream.client

    def row(self) -> Row:
        job = self.job
        return Row(job.prompt, self.said, job.choosing, job.stop_ids, job.vocab, self.luck)


def sequences_of(stream: Stream, loop: asyncio.AbstractEventLoop | None = None) -> list[Running]:
    return [
        Running(stream, k, loop, list(job.prompt), random.Random(job.choosing.seed))
        for k, job in enumerate(stream.jobs)
    ]
