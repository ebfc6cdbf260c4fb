"""The embedded engine without a server: prompts in, text out, in the calling thread. For api/model.py and
recipes/tasks.py.

The engine delivers into an event loop; this one has a thread of its own, so that it works where a loop already runs (a
notebook).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import nn

from erniekit.data.tokenizer import Tokenizer
from erniekit.devices.base import Device
from erniekit.errors import ErnieKitError
from erniekit.models.config import DecoderConfig
from erniekit.serve.detokenizer import Detokenizer, StopStrings
from erniekit.serve.engines.base import Done, Event, GenerationJob, Token
from erniekit.serve.engines.embedded import EmbeddedEngine, EngineLimits
from erniekit.serve.engines.paged import PagedCache
from erniekit.serve.output_parser import THINK, Delta, OutputParser

NAME = "model"  # of the only model in the engine
BLOCK = 64  # tokens of a cache block
PROMPT_TOKENS = 2048  # in one step
ANY_NUMBER = 1 << 30  # of prompts that may wait


@dataclass
class TextAnswer:
    """The answer to one prompt so far. parsed: its text is divided into thought, answer and tool calls."""

    prompt: Sequence[int]
    tokenizer: Tokenizer
    stop: Sequence[str] = ()
    parsed: bool = False
    tools: bool = False
    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish: str = ""

    def __post_init__(self) -> None:
        self._detokenizer, self._stop = Detokenizer(self.tokenizer), StopStrings(self.stop)
        opened = self.parsed and self.tokenizer.decode(self.prompt[-8:]).rstrip().endswith(THINK)
        self._parser = OutputParser(opened, self.tools) if self.parsed else None

    def take(self, event: Event) -> list[Delta]:
        """What the event adds."""
        if isinstance(event, Token):
            self.tokens.append(event)
            shown = self._stop.add(self._detokenizer.add(event.id))
            self.finish = "stop" if self._stop.hit is not None else ""
        else:
            assert isinstance(event, Done), "a text was asked for, not its pooled states"
            shown = self._stop.add(self._detokenizer.rest(), last=True)
            self.finish = event.reason
        deltas = [Delta("content", shown)] if shown else []
        if self._parser is not None:
            deltas = self._parser.add(shown, last=bool(self.finish))
        for delta in deltas:
            self.text += delta.text if delta.kind == "content" else ""
            self.reasoning += delta.text if delta.kind == "reasoning" else ""
            self.calls += [delta.call] if delta.call else []
        return deltas


class TextPiece(NamedTuple):
    """What one answer grew by."""

    number: int  # of its prompt
    deltas: list[Delta]


class TextEngine:
    """One model's engine. It holds `sequences` answers of `length` tokens at once; more prompts wait."""

    def __init__(
        self,
        tree: nn.Module,
        config: DecoderConfig,
        sequences: int,
        length: int,
        device: Device | None = None,
        proposals: int = 0,
    ) -> None:
        """tree: given to the engine, whose layers then read from its cache. device: steps are recorded there, if it
        can; None: they are not. proposals: tokens that the model's MTP layer proposes, if any."""
        first = next(tree.parameters())
        self.sequences, self.length = sequences, length
        blocks, mtp = sequences * -(-length // BLOCK), proposals > 0
        cache = PagedCache(config, blocks, BLOCK, _cache_dtype(first), first.device, mtp)
        limits = EngineLimits(
            sequences, PROMPT_TOKENS, length, ANY_NUMBER, proposals=proposals, memory_key="max_seq_len"
        )
        self.engine = EmbeddedEngine({NAME: tree}, cache, limits, device)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="erniekit-generate", daemon=True)
        self._thread.start()

    def pieces(self, jobs: Sequence[GenerationJob], answers: Sequence[TextAnswer]) -> Iterator[TextPiece]:
        """Fills the answers; each piece as it comes. A reader that leaves stops the engine's work on the rest."""
        events: SimpleQueue[tuple[int, Event]] = SimpleQueue()

        async def submit() -> Any:
            return self.engine.submit(*jobs)

        async def listen(stream: Any) -> None:
            async for item in stream:
                events.put(item)

        stream = asyncio.run_coroutine_threadsafe(submit(), self._loop).result()
        listening = asyncio.run_coroutine_threadsafe(listen(stream), self._loop)
        try:
            left = len(jobs)
            while left:
                number, event = events.get()
                answer = answers[number]
                if answer.finish:
                    continue
                if isinstance(event, Done) and event.reason == "error":
                    raise ErnieKitError(f"generation failed: {event.message}", where=f"prompt {number + 1}")
                deltas = answer.take(event)
                if answer.finish:
                    left -= 1
                    self.engine.cancel(stream, number)
                if deltas:
                    yield TextPiece(number, deltas)
        finally:
            self.engine.cancel(stream)
            listening.cancel()

    def close(self) -> None:
        """Ends its threads and frees its cache."""
        self.engine.stop("closed")
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()


def _cache_dtype(first: torch.Tensor) -> torch.dtype:
    return first.dtype if first.dtype.is_floating_point else torch.float32
