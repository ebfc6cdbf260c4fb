"""A running sequence: its tokens, its cache blocks and how far it is. Used by embedded.py and fair_queue.py."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from erniekit.serve.engines.base import GenerationJob, Token, TokenMatcher, TokenStream
from erniekit.serve.engines.pooling import PooledStates
from erniekit.serve.engines.sampler import SamplerRow
from erniekit.serve.engines.vision_input import FeatureReader


@dataclass(eq=False)
class RunningSequence:
    stream: TokenStream
    number: int  # of its job in the stream
    loop: asyncio.AbstractEventLoop | None  # None: no listener
    ids: list[int]
    seed: int  # of 64 bits, signed
    table: list[int] = field(default_factory=list)
    cached: int = 0  # positions whose keys and values are in the cache
    # Positions that a sampled token or a pooled vector has seen: with a NaN among their keys and values it were none.
    proven: int = 0
    gone: bool = False  # cancelled, or done
    # Of recorded.py, where steps are launched before the tokens of those before them are known:
    slot: int = -1  # its row of the step's state
    ahead: int = 0  # tokens that are launched and not read
    placed: bool = False  # its last token is in the state
    epoch: int = 0  # how often it was preempted: what was launched before is no longer its own
    preempted: bool = False  # it was preempted for another request once, and is not again
    features: FeatureReader | None = None  # of the pictures in its prompt
    matcher: TokenMatcher | None = None  # of its grammar
    pooled: PooledStates | None = None  # of a prompt whose pooled states are requested
    held: list[Token] = field(default_factory=list)  # sampled and not delivered yet (exact_logprobs.py)
    ends_text: Callable[[int], bool] | None = None  # of its job's text_end
    proposals: list[int] = field(default_factory=list)  # tokens that may follow, not verified yet (speculation.py)

    @property
    def job(self) -> GenerationJob:
        return self.stream.jobs[self.number]

    @property
    def generated(self) -> list[int]:
        return self.ids[len(self.job.prompt) :]

    @property
    def length(self) -> int:
        """With the tokens that are launched."""
        return len(self.ids) + self.ahead

    @property
    def left(self) -> int:
        """Tokens that it may still be given."""
        return self.job.sampling.max_tokens - (self.length - len(self.job.prompt))

    @property
    def client(self) -> str:
        return self.stream.client

    def row(self) -> SamplerRow:
        job = self.job
        return SamplerRow(job.prompt, self.generated, job.sampling, job.stop_ids, job.vocab, self.seed, self.matcher)


def sequences_of(stream: TokenStream, loop: asyncio.AbstractEventLoop | None = None) -> list[RunningSequence]:
    return [
        RunningSequence(
            stream,
            k,
            loop,
            list(job.prompt),
            signed(random.getrandbits(64) if job.sampling.seed is None else job.sampling.seed),
            features=None if job.vision is None else FeatureReader(job.vision),
            matcher=None if job.grammar is None else job.grammar.start(),
            pooled=None if job.pooling is None else PooledStates(job.pooling),
            ends_text=None if job.text_end is None else job.text_end(),
        )
        for k, job in enumerate(stream.jobs)
    ]


def signed(number: int) -> int:
    """Its last 64 bits as torch's int64 has them."""
    number &= 2**64 - 1
    return number - 2**64 if number >> 63 else number
