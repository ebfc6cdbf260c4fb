"""The interface of an inference engine: jobs in, token events out. Used by serve/api.py and implemented by embedded.py.

An engine handles token ids and image patches: detokenizing, stop strings and OpenAI's objects belong to serve/.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

    from erniekit.serve.engines.pooling import Pooling
    from erniekit.serve.engines.vision_input import PromptVision

# The client of the current task's request: set by serve/middleware.py, read by `submit`. A client is an address: the
# server has one key, and without a key anything else in a request could be made up for a larger share.
CLIENT: ContextVar[str] = ContextVar("client", default="")

GREEDY_TEMPERATURE = 1e-5  # below it sampling is greedy: scores divided by less may overflow float32
GREEDY_TOP_P = 2.0**-23  # below it top_p keeps one token: float32 cannot distinguish them from none


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is sampled."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # below GREEDY_TEMPERATURE always takes the likeliest token
    top_p: float = 1.0  # below GREEDY_TOP_P as well
    top_k: int = 0  # the number of likeliest tokens kept; 0: no limit
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_p: float = 0.0  # tokens with less than this share of the likeliest one's chance are dropped
    allowed: tuple[int, ...] = ()  # the only tokens that may come; empty: all
    bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its score)
    seed: int | None = None
    logprobs: int | None = None  # None: not requested; else how many of the likeliest next to the chosen one
    ignore_stop: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_p < GREEDY_TOP_P

    @property
    def plain(self) -> bool:
        """Scores are taken as the model gives them."""
        return (
            not self.bias
            and not self.allowed
            and not self.min_tokens
            and not self.min_p
            and self.repetition_penalty == 1
            and not self.frequency_penalty
            and not self.presence_penalty
        )


class TokenMatcher(Protocol):
    """Which tokens may come next in one sequence."""

    problem: str  # why none can be given any more; empty: there is no problem

    def allowed(self, generated: Sequence[int]) -> np.ndarray:
        """int32, a bit per token, for the token behind `generated`."""


class Grammar(Protocol):
    """What an answer must be (serve/structured.py)."""

    def start(self) -> TokenMatcher: ...


@dataclass(frozen=True)
class GenerationJob:
    prompt: tuple[int, ...]
    model: str
    sampling: SamplingParams
    stop_ids: frozenset[int]
    vocab: int  # ids the tokenizer can spell; the model may have padding behind them
    vision: PromptVision | None = field(default=None, compare=False)  # the pictures of the prompt
    grammar: Grammar | None = field(default=None, compare=False)  # what the answer must be
    pooling: Pooling | None = None  # the pooled states of the prompt are requested, and no token
    salt: str = ""  # prefixes are shared only between jobs with the same salt
    # Of an answer that is delivered as a whole (exact_logprobs.py): a function for each sequence that is given its
    # tokens one by one, and is true at the one that ends its text. Elsewhere the listener cancels what it has read.
    text_end: Callable[[], Callable[[int], bool]] | None = field(default=None, compare=False)

    @property
    def prefix_key(self) -> str:
        """Cached prefixes are shared between jobs of one key."""
        return f"{self.model}\0{self.salt}"


@dataclass(frozen=True)
class Token:
    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Done:
    reason: str  # stop: the model ended it; length: a limit did; error: it failed, and `message` may be shown
    message: str = ""


@dataclass(frozen=True)
class Pooled:
    """The pooled states of a prompt."""

    vector: tuple[float, ...]


Event = Token | Pooled | Done


class QueueFull(Exception):
    """Too many sequences wait; retry later."""


class ModelRemoved(Exception):
    """No more sequences are accepted for this model."""


class TokenStream:
    """The events of one request's jobs, each with its job's number; every job ends in a Done.

    Made in the event loop, and filled by the engine through it.
    """

    def __init__(self, jobs: Sequence[GenerationJob], client: str = "") -> None:
        self.jobs, self.client = tuple(jobs), client
        self.events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.cached = [0] * len(self.jobs)  # tokens of each job's prompt that were in the cache; the engine's to set

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        left = len(self.jobs)
        while left:
            number, event = await self.events.get()
            left -= isinstance(event, Done)
            yield number, event


@dataclass
class Load:
    """What an engine is doing, for /health and /metrics."""

    running: int = 0
    waiting: int = 0
    cache_used: float = 0.0  # share of the blocks
    steps: int = 0
    prefix_queries: int = 0  # tokens of prompts that were looked for in the cache
    prefix_hits: int = 0  # those that were there
    evicted: int = 0  # sequences preempted for lack of blocks
    preempted: int = 0  # sequences put back in favour of other clients or requests
    proposed: int = 0  # tokens of proposals that were verified (speculative decoding)
    proposals_held: int = 0  # those of them that were accepted
    features: int = 0  # bytes of features of pictures that are kept
    looks: int = 0  # pictures and pairs of frames that were computed
    healthy: bool = True
    reason: str = ""

    @property
    def acceptance(self) -> float:
        """The share of proposed tokens that were accepted."""
        return round(self.proposals_held / self.proposed, 6) if self.proposed else 0.0


class InferenceEngine(Protocol):
    def submit(self, *jobs: GenerationJob) -> TokenStream:
        """In the event loop, in the task of the request. Raises QueueFull and ModelRemoved."""

    def cancel(self, stream: TokenStream, number: int | None = None) -> None:
        """Stop one job or all before the next step and free their places; no more events come. Harmless when done."""

    def load(self) -> Load: ...

    def stop(self, message: str) -> None:
        """End everything that runs with an error event, then the engine."""
