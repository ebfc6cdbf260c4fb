"""A running request: submits its jobs to the engine and yields their text until all have ended. Used by api.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from erniekit.serve.detokenizer import Detokenizer, StopStrings
from erniekit.serve.engines.base import Done, Event, InferenceEngine, QueueFull, Token, TokenStream
from erniekit.serve.output_parser import Delta, OutputParser
from erniekit.serve.request_error import RequestError
from erniekit.serve.request_parsing import PreparedRequest

TIMED_OUT, STOPPED = -1, -2  # numbers of no job: the time is up; the server stops and the engine does not report it


@dataclass(frozen=True)
class ChoiceDelta:
    """What events that came together add to one choice."""

    number: int
    deltas: list[Delta]
    tokens: list[Token]
    finish: str | None = None  # stop | length | tool_calls


@dataclass
class ChoiceState:
    """One choice so far."""

    prepared: PreparedRequest
    whole: bool = False  # not streamed: detokenized at its end, unless there are stop strings
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.prepared.served.tokenizer)
        self._stop = StopStrings(self.prepared.stop, self.prepared.keep_stop)
        self._parser = (
            OutputParser(self.prepared.reasoning_open, self.prepared.tools, self.prepared.one_call)
            if self.prepared.chat
            else None
        )

    def take(self, number: int, events: list[Event]) -> ChoiceDelta:
        """Tokens, and behind them the end if it has come: what came together goes out together."""
        tokens = [event for event in events if isinstance(event, Token)]
        shown = "" if self.whole and not self.prepared.stop else self._shown(tokens)
        if self._stop.hit is not None:
            deltas = self._end(number, "", "stop", shown).deltas
            return ChoiceDelta(number, deltas, tokens, self.finish)
        self.tokens += [] if self.prepared.stop else tokens
        end = events[-1]
        if not isinstance(end, Done):
            deltas = self._divided(shown)
            if self._has_only_call:
                self.finish = "tool_calls"
            return ChoiceDelta(number, deltas, tokens, self.finish)
        part = self._end(number, self._rest(), end.reason, shown)
        return ChoiceDelta(number, part.deltas, tokens, part.finish)

    @property
    def _has_only_call(self) -> bool:
        return self.prepared.one_call and self._parser is not None and self._parser.called > 0

    def _shown(self, tokens: list[Token]) -> str:
        """Their text as far as it may be shown; of tokens behind a stop string nothing is left."""
        if not self.prepared.stop:
            return self._detokenizer.add(*(token.id for token in tokens)) if tokens else ""
        shown = ""
        for k, token in enumerate(tokens):
            self.tokens.append(token)
            shown += self._stop.add(self._detokenizer.add(token.id))
            if self._stop.hit is not None:
                del tokens[k + 1 :]
                break
        return shown

    def _rest(self) -> str:
        if self._detokenizer.ids:
            return self._detokenizer.rest()
        return self.prepared.served.tokenizer.decode([token.id for token in self.tokens])

    def _end(self, number: int, rest: str, reason: str, shown: str = "") -> ChoiceDelta:
        shown += self._stop.add(rest, last=True)
        deltas = self._divided(shown, last=True)
        parser = self._parser
        called = parser is not None and parser.called > 0 and not (parser.cut and reason == "length")
        self.finish = "tool_calls" if called else reason
        return ChoiceDelta(number, deltas, [], self.finish)

    def _divided(self, text: str, last: bool = False) -> list[Delta]:
        if self._parser is not None:
            return self._parser.add(text, last)
        return [Delta("content", text)] if text else []


def submit(prepared: PreparedRequest, engine: InferenceEngine) -> TokenStream:
    """Raises ModelRemoved."""
    try:
        return engine.submit(*prepared.jobs)
    except QueueFull:
        raise RequestError(
            429, "the server is busy: its queue is full", code="queue_full", headers={"Retry-After": "1"}
        ) from None


class RunningRequest:
    """Submits at once, so that a full queue is known before anything is answered."""

    def __init__(
        self,
        prepared: PreparedRequest,
        engine: InferenceEngine,
        timeout: float,
        whole: bool = False,
        details: bool = False,
    ) -> None:
        """whole: not streamed. details: usage counts the prompt's tokens that were cached."""
        self.prepared, self.engine, self.details = prepared, engine, details
        self.began = time.monotonic()
        self.deadline = self.began + timeout
        self.first: float | None = None  # when the first token came
        self.choices = [ChoiceState(prepared, whole) for _ in prepared.jobs]
        self.stream = submit(prepared, engine)

    @property
    def generated(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        prepared = self.prepared.prompt_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": prepared,
            "completion_tokens": self.generated,
            "total_tokens": prepared + self.generated,
        }
        details = {} if self.prepared.served.vision is None else self.prepared.vision_tokens()
        if self.details:
            each = len(self.choices) // self.prepared.prompts
            details["cached_tokens"] = sum(self.stream.cached[::each])
        if details:
            usage["prompt_tokens_details"] = details
        return usage

    def stop(self) -> None:
        self.stream.events.put_nowait((STOPPED, Done("error")))

    async def parts(self) -> AsyncIterator[ChoiceDelta]:
        loop, events = asyncio.get_running_loop(), self.stream.events
        late = (TIMED_OUT, Done("error", "the answer took longer than this server allows"))
        # Cheaper than a time-out on each of a thousand waits.
        alarm = loop.call_later(self.deadline - time.monotonic(), events.put_nowait, late)
        try:
            left = len(self.choices)
            while left:
                # All that has come since: several tokens of a burst, or what waited for a slow reader.
                came = [await events.get()]
                while not events.empty():
                    came.append(events.get_nowait())
                by_choice: dict[int, list[Event]] = {}
                problem: RequestError | None = None
                for number, event in came:
                    if number == TIMED_OUT:
                        problem = RequestError(504, late[1].message, code="timeout")
                    elif number == STOPPED:
                        problem = RequestError(503, "the server is stopping", code="stopping")
                    elif isinstance(event, Done) and event.reason == "error" and self.choices[number].finish is None:
                        problem = RequestError(500, event.message)
                    else:
                        by_choice.setdefault(number, []).append(event)
                if self.first is None:
                    self.first = time.monotonic()
                for number, some in by_choice.items():
                    choice = self.choices[number]
                    if choice.finish is None:
                        part = choice.take(number, some)
                        if choice.finish is not None:
                            left -= 1
                            self.engine.cancel(self.stream, number)
                        yield part
                if problem is not None:
                    raise problem
        finally:
            alarm.cancel()
            self.engine.cancel(self.stream)
