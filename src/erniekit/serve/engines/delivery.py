"""Passes events from the engine's thread to the event loops of the requests. Used by embedded.py."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from erniekit.serve.engines.base import Event, TokenStream
from erniekit.serve.engines.sequence import RunningSequence

SequenceEvent = tuple[RunningSequence, Event]


def deliver(events: Sequence[SequenceEvent]) -> None:
    """One call into each event loop for a whole step."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[TokenStream, int, Event]]] = {}
    for run, event in events:
        assert run.loop is not None
        by_loop.setdefault(run.loop, []).append((run.stream, run.number, event))
    for loop, batch in by_loop.items():
        try:
            loop.call_soon_threadsafe(put, batch)
        except RuntimeError:  # that loop is closed
            pass


def put(batch: Sequence[tuple[TokenStream, int, Event]]) -> None:
    for stream, number, event in batch:
        stream.events.put_nowait((number, event))
