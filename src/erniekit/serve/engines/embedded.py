"""The engine in the server's own process: continuous batches over a paged cache, on our models, CPU or GPU.

Made by serve/shelf.py, called by serve/api.py. One thread computes; requests join and leave between two steps. Models
that share a base (it and its adapters) share the cache, and a step runs once for each of them that has work.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from erniekit.log import warn
from erniekit.models.layers.router import Router
from erniekit.serve.engines.base import Done, Event, Job, Load, QueueFull, Stream, Token
from erniekit.serve.engines.choose import Row, choose
from erniekit.serve.engines.paged import PagedAttention, PagedCache, Piece, Step, install

FAULTS = 3  # steps in a row without one that worked, after which the engine calls itself ill


@dataclass(frozen=True)
class Limits:
    sequences: int = 8  # at once
    tokens: int = 384  # of prompts, in one step
    length: int = 2048  # prompt and answer
    queue: int = 64  # requests that may wait


@dataclass(eq=False)
class Running:
    """A sequence and how far it is."""

    stream: Stream
    number: int  # of its job in the stream
    loop: asyncio.AbstractEventLoop
    ids: list[int]
    luck: random.Random
    table: list[int] = field(default_factory=list)
    cached: int = 0  # positions whose keys and values are in the cache
    gone: bool = False  # cancelled, or done

    @property
    def job(self) -> Job:
        return self.stream.jobs[self.number]

    @property
    def said(self) -> list[int]:
        return self.ids[len(self.job.prompt) :]


class EmbeddedEngine:
    """models: by name, all of one shape and on one device; their layers are given the paged cache."""

    def __init__(self, models: Mapping[str, nn.Module], cache: PagedCache, limits: Limits) -> None:
        if cache.blocks < cache.blocks_for(limits.length):
            raise ValueError("the cache must hold one sequence of full length")
        self.models, self.cache, self.limits = dict(models), cache, limits
        self._attention: dict[str, list[PagedAttention]] = {}
        for name, model in self.models.items():
            _take_every_token(model.eval().requires_grad_(False))
            self._attention[name] = install(model, cache)
        self.device = next(next(iter(self.models.values())).parameters()).device
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        self._streams: dict[Stream, list[Running]] = {}
        self._lock = threading.Condition()
        self._stopping: str | None = None
        self._steps = self._evicted = self._faults = 0
        self._fault = ""
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    # --- called from the event loop

    def submit(self, *jobs: Job) -> Stream:
        assert all(job.model in self.models and 0 < len(job.prompt) < self.limits.length for job in jobs)
        stream, loop = Stream(jobs), asyncio.get_running_loop()
        runs = [
            Running(stream, k, loop, list(job.prompt), random.Random(job.choosing.seed)) for k, job in enumerate(jobs)
        ]
        with self._lock:
            if self._stopping is not None:
                _put([(stream, k, Done("error", self._stopping)) for k in range(len(jobs))])
                return stream
            free = self.limits.sequences - len(self._running)
            if len(self._waiting) >= self.limits.queue + max(0, free):
                raise QueueFull
            self._waiting.extend(runs)
            self._streams[stream] = runs
            self._lock.notify()
        return stream

    def cancel(self, stream: Stream, number: int | None = None) -> None:
        with self._lock:
            for run in self._streams.get(stream, ()):
                run.gone = run.gone or number is None or run.number == number
            self._forget(stream)
            self._lock.notify()

    def _forget(self, stream: Stream) -> None:
        if all(run.gone for run in self._streams.get(stream, ())):
            self._streams.pop(stream, None)

    def load(self) -> Load:
        with self._lock:
            return Load(
                running=len(self._running),
                waiting=len(self._waiting),
                cache_used=self.cache.used,
                steps=self._steps,
                evicted=self._evicted,
                healthy=self._thread.is_alive() and self._faults < FAULTS and self._stopping is None,
                reason=self._stopping or self._fault,
            )

    def stop(self, message: str = "the server is stopping", timeout: float = 10) -> None:
        with self._lock:
            self._stopping = self._stopping or message
            self._lock.notify()
        self._thread.join(timeout)

    # --- the engine's thread

    def _work(self) -> None:
        message = "the engine has ended"
        try:
            with torch.inference_mode():
                while self._wait():
                    self._step()
            message = self._stopping or message
        except BaseException as error:  # not of one request: nothing can go on
            warn(f"the engine ended: {type(error).__name__}: {error}")
            raise
        finally:
            with self._lock:
                self._stopping = message
                left = [run for runs in self._streams.values() for run in runs if not run.gone]
                self._streams.clear()
                self._running.clear()
                self._waiting.clear()
            self._deliver([(run, Done("error", message)) for run in left])

    def _wait(self) -> bool:
        """Until there is something to do; False when it is time to stop. Cancelled sequences leave here."""
        with self._lock:
            while self._stopping is None:
                for run in [run for run in self._running if run.gone]:
                    self._leave(run)
                if any(run.gone for run in self._waiting):
                    self._waiting = deque(run for run in self._waiting if not run.gone)
                if self._running or self._waiting:
                    return True
                self._lock.wait()
            return False

    def _step(self) -> None:
        with self._lock:
            plan = self._plan()
        events: list[tuple[Running, Event]] = []
        worked = False
        for name in dict.fromkeys(run.job.model for run, _ in plan):
            group = [(run, piece) for run, piece in plan if run.job.model == name]
            for part, outcome in self._guarded(name, group):
                worked = worked or not isinstance(outcome, Exception)
                events += self._settle(part, outcome)
        with self._lock:
            self._steps += 1
            self._faults = 0 if worked or not plan else self._faults + 1
            told = [(run, event) for run, event in events if not run.gone]
            for run, event in told:
                if isinstance(event, Done):
                    run.gone = True
                    self._leave(run)
                    self._forget(run.stream)
        self._deliver(told)

    def _plan(self) -> list[tuple[Running, Piece]]:
        """What this step computes. Sequences that speak go first, then prompts in pieces, as many tokens as allowed."""
        while self._waiting and len(self._running) < self.limits.sequences:
            run = self._waiting[0]
            # A block to spare for each that runs: who is let in just to be put out again computes for nothing.
            if self._running and self.cache.blocks_for(len(run.ids)) + len(self._running) > len(self.cache.free):
                break
            self._running.append(self._waiting.popleft())
        budget = self.limits.tokens
        ends: dict[Running, int] = {}
        for run in sorted(self._running, key=lambda run: len(run.ids) - run.cached > 1):
            todo = len(run.ids) - run.cached
            count = todo if todo == 1 else min(todo, budget)
            if run in self._running and count > 0 and self._room(run, run.cached + count, ends):
                ends[run] = run.cached + count
                budget -= count
        return [(run, Piece(run.ids, run.cached, end, run.table)) for run, end in ends.items()]

    def _room(self, run: Running, length: int, planned: dict[Running, int]) -> bool:
        """Blocks for a sequence; the youngest others wait again if there are none, and compute their past anew."""
        while not self.cache.grow(run.table, length):
            victim = self._running[-1]
            planned.pop(victim, None)
            self._leave(victim)
            self._evicted += 1
            victim.cached = 0
            self._waiting.appendleft(victim)
            if victim is run:
                return False
        return True

    def _leave(self, run: Running) -> None:
        if run in self._running:
            self._running.remove(run)
        self.cache.release(run.table)

    def _guarded(self, name: str, group: list[tuple[Running, Piece]]) -> list[tuple[list[Any], Any]]:
        """A step that fails is tried again one by one: only who brings it down pays for it."""
        try:
            return [(group, self._forward(name, group))]
        except Exception as error:
            if len(group) == 1:
                self._fault = f"{type(error).__name__}: {error}"
                warn(f"a request failed in the engine: {self._fault}")
                return [(group, error)]
            return [result for one in group for result in self._guarded(name, [one])]

    def _forward(self, name: str, group: Sequence[tuple[Running, Piece]]) -> list[Token | None]:
        model: Any = self.models[name]
        step = Step.of([piece for _, piece in group], self.cache.size, self.device)
        for inner in self._attention[name]:
            inner.step = step
        hidden = model.run_layers(model.embed(step.tokens), model.context(step.positions))
        speaking = [k for k, (run, piece) in enumerate(group) if piece.stop == len(run.ids)]
        if not speaking:
            return []
        last = model.norm(hidden[0, step.last[speaking]])
        logits = model.output.logits(last, model.head_weight(), model.head_bias_or_none())
        return choose(logits, [_row(group[k][0]) for k in speaking])

    def _settle(self, group: list[tuple[Running, Piece]], outcome: Any) -> list[tuple[Running, Event]]:
        """The sequences after the step, and what their clients are told."""
        if isinstance(outcome, Exception):
            return [(run, Done("error", "the engine failed on this request")) for run, _ in group]
        events: list[tuple[Running, Event]] = []
        tokens = iter(outcome)
        for run, piece in group:
            speaks = piece.stop == len(run.ids)
            run.cached = piece.stop
            if not speaks:
                continue
            token, wish = next(tokens), run.job.choosing
            if token is None:
                events.append((run, Done("error", "the model gave no usable number for the next token")))
            elif token.id in run.job.stop_ids and not wish.ignore_stop:
                events.append((run, Done("stop")))
            else:
                run.ids.append(token.id)
                events.append((run, token))
                if len(run.ids) - len(run.job.prompt) >= wish.max_tokens or len(run.ids) >= self.limits.length:
                    events.append((run, Done("length")))
        return events

    def _deliver(self, events: Sequence[tuple[Running, Event]]) -> None:
        """One call into each event loop for a whole step."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, int, Event]]] = {}
        for run, event in events:
            by_loop.setdefault(run.loop, []).append((run.stream, run.number, event))
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put, batch)
            except RuntimeError:  # that loop is closed: nobody listens any more
                pass


def _put(batch: Sequence[tuple[Stream, int, Event]]) -> None:
    for stream, number, event in batch:
        stream.events.put_nowait((number, event))


def _row(run: Running) -> Row:
    job = run.job
    return Row(job.prompt, run.said, job.choosing, job.stop_ids, job.vocab, run.luck)


def _take_every_token(model: nn.Module) -> None:
    """An expert's room is a rule of training: at answering a token's way must not depend on who else is asking."""
    for module in model.modules():
        if isinstance(module, Router):
            module.capacity = module.most = None
