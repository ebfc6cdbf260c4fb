"""A request under way: the engine's tokens as text, part by part, until each answer has ended. Used by api.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from erniekit.serve.asked import Asked
from erniekit.serve.engines.base import Done, Engine, Event, QueueFull, Token
from erniekit.serve.problem import Problem
from erniekit.serve.speech import Delta, Speech
from erniekit.serve.spelling import Spelling, StopWords

LATE, STOPPED = -1, -2  # numbers of no job: the time is up; the server stops and the engine does not say so


@dataclass(frozen=True)
class Part:
    """What one event adds to one answer."""

    number: int
    deltas: list[Delta]
    tokens: list[Token]
    finish: str | None = None  # stop | length | tool_calls


@dataclass
class Choice:
    """One answer so far."""

    asked: Asked
    whole: bool = False  # nobody reads along: it is spelled at its end, unless a stop word must be looked for
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None

    def __post_init__(self) -> None:
        self._spelling = Spelling(self.asked.served.tokenizer)
        self._stop = StopWords(self.asked.stop)
        self._speech = Speech(self.asked.thinks, self.asked.tools) if self.asked.chat else None

    def take(self, number: int, event: Event) -> Part:
        if isinstance(event, Done):
            if event.reason == "error":
                raise Problem(500, event.message)
            return self._end(number, self._rest(), event.reason)
        self.tokens.append(event)
        if self.whole and not self.asked.stop:
            return Part(number, [], [event])
        shown = self._stop.add(self._spelling.add(event.id))
        if self._stop.hit is not None:
            part = self._end(number, "", "stop", shown)
            return Part(number, part.deltas, [event], part.finish)
        return Part(number, self._divided(shown), [event])

    def _rest(self) -> str:
        if self._spelling.ids:
            return self._spelling.rest()
        return self.asked.served.tokenizer.decode([token.id for token in self.tokens])

    def _end(self, number: int, rest: str, reason: str, shown: str = "") -> Part:
        shown += self._stop.add(rest, last=True)
        deltas = self._divided(shown, last=True)
        self.finish = "tool_calls" if self._speech and self._speech.called else reason
        return Part(number, deltas, [], self.finish)

    def _divided(self, text: str, last: bool = False) -> list[Delta]:
        if self._speech is not None:
            return self._speech.add(text, last)
        return [Delta("content", text)] if text else []


class Answering:
    """Submits at once, so that a full queue is known before anything is answered."""

    def __init__(self, asked: Asked, engine: Engine, timeout: float, whole: bool = False) -> None:
        self.asked, self.engine = asked, engine
        self.began = time.monotonic()
        self.deadline = self.began + timeout
        self.first: float | None = None  # when the first token came
        self.choices = [Choice(asked, whole) for _ in asked.jobs]
        try:
            self.stream = engine.submit(*asked.jobs)
        except QueueFull:
            raise Problem(
                429, "the server is busy: its queue is full", code="queue_full", headers={"Retry-After": "1"}
            ) from None

    @property
    def said(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)

    def usage(self) -> dict[str, int]:
        asked = self.asked.prompt_tokens
        return {"prompt_tokens": asked, "completion_tokens": self.said, "total_tokens": asked + self.said}

    def stop(self) -> None:
        self.stream.events.put_nowait((STOPPED, Done("error")))

    async def parts(self) -> AsyncIterator[Part]:
        loop, events = asyncio.get_running_loop(), self.stream.events
        late = (LATE, Done("error", "the answer took longer than this server allows"))
        # Cheaper than a time-out on each of a thousand waits.
        alarm = loop.call_later(self.deadline - time.monotonic(), events.put_nowait, late)
        try:
            left = len(self.choices)
            while left:
                number, event = await events.get()
                if number == LATE:
                    raise Problem(504, late[1].message, code="timeout")
                if number == STOPPED:
                    raise Problem(503, "the server is stopping", code="stopping")
                if self.first is None:
                    self.first = time.monotonic()
                choice = self.choices[number]
                if choice.finish is None:
                    part = choice.take(number, event)
                    if choice.finish is not None:
                        left -= 1
                        self.engine.cancel(self.stream, number)
                    yield part
        finally:
            alarm.cancel()
            self.engine.cancel(self.stream)
