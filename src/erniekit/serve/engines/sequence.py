"""A running sequence: its tokens, its cache blocks and how far it is. Used by embedded.py and fair_queue.py."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from erniekit.serve.engines.base import GenerationJob, TokenStream
from erniekit.serve.engines.sampler import SamplerRow
from erniekit.serve.engines.vision_input import FeatureReader


@dataclass(eq=False)
class RunningSequence:
    stream: TokenStream
    number: int  # of its job in the stream
    loop: asyncio.AbstractEventLoop | None  # None: no listener
    ids: list[int]
    rng: random.Random
    table: list[int] = field(default_factory=list)
    cached: int = 0  # positions whose keys and values are in the cache
    gone: bool = False  # cancelled, or done
    preempted: bool = False  # it has made room for another request once, and does not again
    features: FeatureReader | None = None  # of the pictures in its prompt

    @property
    def job(self) -> GenerationJob:
        return self.stream.jobs[self.number]

    @property
    def generated(self) -> list[int]:
        return self.ids[len(self.job.prompt) :]

    @property
    def client(self) -> str:
        return self.stream.client

    def row(self) -> SamplerRow:
        job = self.job
        return SamplerRow(job.prompt, self.generated, job.sampling, job.stop_ids, job.vocab, self.rng)


def sequences_of(stream: TokenStream, loop: asyncio.AbstractEventLoop | None = None) -> list[RunningSequence]:
    return [
        RunningSequence(
            stream,
            k,
            loop,
            list(job.prompt),
            random.Random(job.sampling.seed),
            features=None if job.vision is None else FeatureReader(job.vision),
        )
        for k, job in enumerate(stream.jobs)
    ]
