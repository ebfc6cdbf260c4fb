"""The engine in the server's own process: continuous batching over a paged KV cache, on our models, CPU or GPU.

Built by serve/loaded_models.py. One thread computes; requests join and leave between two steps (continuous batching).
Models that share a base (it and its adapters) share the cache. A recorded step runs for all of them, a plain one for
each that has work.
Here is who computes what and when; plain_step.py and recorded.py compute. With recorded steps a launch is made before
the tokens of the one before it are read: a sequence that has ended is noticed one launch late, and what was computed
for it beyond its end is dropped.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from erniekit.devices.base import Device
from erniekit.log import warn
from erniekit.serve.engines.base import (
    CLIENT,
    Done,
    GenerationJob,
    Load,
    QueueFull,
    SamplingParams,
    Token,
    TokenStream,
)
from erniekit.serve.engines.delivery import Told, deliver, put
from erniekit.serve.engines.fair_queue import FairQueue, in_turn, over_share, youngest_of_largest
from erniekit.serve.engines.paged import PagedCache, SequencePiece
from erniekit.serve.engines.plain_step import PlainSteps, Planned, remove_expert_capacity
from erniekit.serve.engines.recorded import LaunchedStep, RecordedSteps, needs_history
from erniekit.serve.engines.sequence import RunningSequence, sequences_of
from erniekit.serve.engines.vision_input import FeatureCache

FAULTS = 3  # probes in a row that failed, after which the engine calls itself unhealthy
PROBE_S = 2.0  # between the probes of an engine that is unhealthy


@dataclass(frozen=True)
class EngineLimits:
    sequences: int = 8  # at once
    tokens: int = 384  # of prompts, in one step
    length: int = 2048  # prompt and answer
    queue: int = 64  # sequences that may wait
    feature_bytes: int = 512 << 20  # of pictures, kept in host memory
    burst: int = 4  # tokens of each sequence in one launch of recorded steps, while no prompt is read


class EmbeddedEngine:
    """models: by name, all of one shape and on one device; their layers are given the paged cache. device: given, steps
    have fixed shapes and are recorded as graphs if it can; None: each step has the shape of its batch, and
    its tokens are read before the next."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        cache: PagedCache,
        limits: EngineLimits,
        device: Device | None = None,
    ) -> None:
        if cache.blocks < cache.blocks_for(limits.length):
            raise ValueError("the cache must hold one sequence of full length")
        self.models, self.cache, self.limits = dict(models), cache, limits
        self.features = FeatureCache(limits.feature_bytes)
        for model in self.models.values():
            remove_expert_capacity(model.eval().requires_grad_(False))
        self.plain = PlainSteps(self.models, cache, self.features)
        self.device = self.plain.device
        self.recorded: RecordedSteps | None = None
        if device is not None:
            sizes = (limits.sequences, limits.tokens, limits.length, limits.burst)
            self.recorded = RecordedSteps(self.models, cache, device, *sizes)
        self._launched: deque[LaunchedStep] = deque()
        self._waiting = FairQueue(limits.queue)
        self._running: list[RunningSequence] = []
        self._streams: dict[TokenStream, list[RunningSequence]] = {}
        self._lock = threading.Condition()
        self._stopping: str | None = None
        self._steps = self._evicted = self._preempted = self._faults = 0
        self._fault = ""
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    # --- called from the event loop

    def submit(self, *jobs: GenerationJob) -> TokenStream:
        assert all(job.model in self.models and 0 < len(job.prompt) < self.limits.length for job in jobs)
        stream = TokenStream(jobs, CLIENT.get())
        runs = sequences_of(stream, asyncio.get_running_loop())
        with self._lock:
            if self._stopping is not None:
                put([(stream, k, Done("error", self._stopping)) for k in range(len(jobs))])
                return stream
            if not self._waiting.accepts(stream, self._running, self.limits.sequences):
                raise QueueFull
            self._waiting.add(runs)
            self._streams[stream] = runs
            self._lock.notify()
        return stream

    def cancel(self, stream: TokenStream, number: int | None = None) -> None:
        with self._lock:
            for run in self._streams.get(stream, ()):
                run.gone = run.gone or number is None or run.number == number
            self._forget(stream)
            self._lock.notify()

    def _forget(self, stream: TokenStream) -> None:
        if all(run.gone for run in self._streams.get(stream, ())):
            self._streams.pop(stream, None)

    def load(self) -> Load:
        with self._lock:
            return Load(
                running=len(self._running),
                waiting=len(self._waiting),
                cache_used=self.cache.used,
                steps=self._steps,
                prefix_queries=self.cache.asked,
                prefix_hits=self.cache.shared,
                evicted=self._evicted,
                preempted=self._preempted,
                features=self.features.size,
                looks=self.features.misses,
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
                self._record()
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
            deliver([(run, Done("error", message)) for run in left])

    def _wait(self) -> bool:
        """Until there is something to do; False when it is time to stop. Cancelled sequences leave here."""
        with self._lock:
            while self._stopping is None:
                for run in [run for run in self._running if run.gone]:
                    self._leave(run)
                self._waiting.drop_gone()
                if self._running or len(self._waiting) or self._launched:
                    return True
                # A load balancer sends nothing to an unhealthy engine: it probes itself, by a step without work.
                if not self._lock.wait(PROBE_S if self._faults >= FAULTS else None):
                    return True
            return False

    def _record(self) -> None:
        """Before the first request; a device that cannot after all computes as one that never could."""
        if self.recorded is None:
            return
        try:
            self.recorded.record_all()
        except Exception as error:
            warn(f"steps are not recorded, answers will be slow: {type(error).__name__}: {error}"[:400])
            self.recorded = None

    def _step(self) -> None:
        with self._lock:
            plan, steps = self._plan()
        events: list[Told] = []
        worked, failed = not plan and bool(self._launched), ""
        groups: dict[str, list[Planned]] = {}
        for run, piece in plan:
            name = run.job.model if self.recorded is None else self.recorded.tree_of(run.job.model)
            groups.setdefault(name, []).append((run, piece))
        behind = 0  # launches that may stay on their way: those of this step
        for name, group in groups.items():
            for part, outcome in self._guarded(name, group, steps, events):
                if isinstance(outcome, Exception):
                    failed = part[0][0].job.model
                else:
                    worked = True
                if isinstance(outcome, LaunchedStep):
                    self._launched.append(outcome)
                    behind += 1
                else:
                    events += self._settle(part, outcome)
        while len(self._launched) > behind:
            events += self._read(self._launched.popleft())
        told = self._note(events, bool(plan))
        if not worked:
            # What a client asked for may be why it failed: the engine is sound if a plain token works.
            worked = self._probe(*([failed] if failed else self.models))
        self._faults = 0 if worked else self._faults + 1
        deliver(told)

    def _note(self, events: list[Told], stepped: bool) -> list[Told]:
        """Who has ended leaves; what is to be told of the others and of them."""
        with self._lock:
            self._steps += stepped
            told = [(run, event) for run, event in events if not run.gone]
            for run, event in told:
                if isinstance(event, Done):
                    run.gone = True
                    self._leave(run)
                    self._forget(run.stream)
        return told

    def _plan(self) -> tuple[list[Planned], int]:
        """What this step computes: sequences that decode first, then chunked prefill, up to the token budget; and how
        many tokens of each that decodes."""
        while (new := self._waiting.next(self._running)) is not None and self._admit(new):
            self._waiting.take(new)
            self._running.append(new)
            if new.job.vision is None:
                new.cached = self.cache.share(new.ids, new.job.prefix_key, new.table)
                if not new.generated:
                    new.stream.cached[new.number] = new.cached
            if self.recorded is not None:
                self.recorded.join(new)
        open_ends = [run for run in self._running if run.left > 0 and run.length < self.limits.length]
        if self._launched and any(needs_history(run) for run in open_ends):
            return [], 1  # what is on its way is read first
        steps = self._burst(open_ends)
        budget = self.limits.tokens
        ends: dict[RunningSequence, int] = {}
        for run in sorted(in_turn(open_ends), key=lambda run: run.length - run.cached > 1):
            todo = run.length - run.cached
            count = steps if run.placed else todo if todo == 1 else min(todo, budget)
            if run in self._running and count > 0 and self._room(run, run.cached + count, ends):
                ends[run] = run.cached + count
                budget -= 0 if run.placed else count
        return [
            (run, SequencePiece(run.ids, run.cached, end, run.table, run.job.vision)) for run, end in ends.items()
        ], steps

    def _burst(self, runs: list[RunningSequence]) -> int:
        """Tokens of each that decodes: several while no prompt is being read. Who waits still waits for a place."""
        if self.recorded is None or not all(run.placed for run in runs):
            return 1
        if any(needs_history(run) for run in runs):
            return 1
        most = min((min(run.left, self.limits.length - run.length) for run in runs), default=1)
        return max(1, min(self.limits.burst, most))

    def _admit(self, new: RunningSequence) -> bool:
        """Whether it can run now. Those of clients and requests that hold more than their share wait again for it."""
        left, free, blocks = list(self._running), self.cache.room, self.cache.blocks_for(len(new.ids))
        # One block is reserved for each that runs: a sequence evicted right after its prompt computed for nothing.
        while left and (len(left) >= self.limits.sequences or blocks + len(left) > free):
            victim = over_share(new, left)
            if victim is None:
                return False
            left.remove(victim)
            free += len(victim.table)
        for victim in [run for run in self._running if run not in left]:
            victim.preempted = True
            self._preempted += 1
            self._put_back(victim)
        return True

    def _room(self, run: RunningSequence, length: int, planned: dict[RunningSequence, int]) -> bool:
        """Blocks for a sequence; others wait again if there are none."""
        while not self.cache.grow(run.table, length):
            victim = youngest_of_largest(self._running)
            planned.pop(victim, None)
            self._evicted += 1
            self._put_back(victim)
            if victim is run:
                return False
        return True

    def _put_back(self, run: RunningSequence) -> None:
        """It waits again, and its cache is recomputed; its tokens stay, and those on their way are drawn again."""
        self._leave(run)
        run.cached = 0
        self._waiting.put_back(run)

    def _leave(self, run: RunningSequence) -> None:
        if run in self._running:
            self._running.remove(run)
            if self.recorded is not None:
                self.recorded.leave(run)
            self._keep(run)
        self.cache.release(run.table)

    def _keep(self, run: RunningSequence) -> None:
        """What it has computed is known to who begins alike."""
        if run.job.vision is None:
            self.cache.keep(run.ids[: run.cached], run.job.prefix_key, run.table)

    def _guarded(
        self, name: str, group: list[Planned], steps: int, events: list[Told]
    ) -> list[tuple[list[Planned], Any]]:
        """Recorded what can be, the rest plainly. events: of launches that have to be read because this one failed."""
        if self.recorded is None:
            return self._one_by_one(name, group)
        plain = [(run, piece) for run, piece in group if run.features is not None and piece.start < len(run.job.prompt)]
        out = [result for one in plain for result in self._one_by_one(one[0].job.model, [one])]
        rest = [each for each in group if each not in plain]
        try:
            return [*out, (rest, self.recorded.launch(name, rest, steps))] if rest else out
        except Exception as error:
            warn(f"a recorded step failed: {type(error).__name__}: {error}"[:400])
        while self._launched:
            events += self._read(self._launched.popleft())
        again = []
        for run, _ in rest:
            run.placed, run.ahead, run.epoch = False, 0, run.epoch + 1
            run.cached = min(run.cached, len(run.ids) - 1)
            if not any(told is run and isinstance(event, Done) for told, event in events):
                again.append((run, SequencePiece(run.ids, run.cached, len(run.ids), run.table, run.job.vision)))
        return [*out, *(result for one in again for result in self._one_by_one(one[0].job.model, [one]))]

    def _one_by_one(self, name: str, group: list[Planned]) -> list[tuple[list[Planned], Any]]:
        """A step that fails is tried again one by one: only who brings it down pays for it."""
        try:
            return [(group, self._forward(name, group))]
        except Exception as error:
            if len(group) == 1:
                self._fault = f"{type(error).__name__}: {error}"
                warn(f"a request failed in the engine: {self._fault}")
                return [(group, error)]
            return [result for one in group for result in self._one_by_one(name, [one])]

    def _probe(self, *names: str) -> bool:
        """Whether a single plain token works, with each of these models."""
        table: list[int] = []
        if not self.cache.grow(table, 1):
            return False
        job = GenerationJob((0,), "", SamplingParams(1, temperature=0), frozenset(), 1)
        try:
            for name in names:
                probe = sequences_of(TokenStream((job,)))[0]
                self._forward(name, [(probe, SequencePiece(probe.ids, 0, 1, table))])
            return True
        except Exception as error:
            self._fault = f"{type(error).__name__}: {error}"
            return False
        finally:
            self.cache.release(table)

    def _forward(self, name: str, group: list[Planned]) -> list[Token | None]:
        return self.plain.run(name, group)

    def _settle(self, group: list[Planned], outcome: Any) -> list[Told]:
        """The sequences after a plain step, and what their clients are told."""
        if isinstance(outcome, Exception):
            return [(run, Done("error", "the engine failed on this request")) for run, _ in group]
        events: list[Told] = []
        tokens = iter(outcome)
        for run, piece in group:
            is_sampled = piece.stop == len(run.ids)
            run.cached = piece.stop
            if is_sampled:
                events += self._said(run, [next(tokens)])
        return events

    def _read(self, launched: LaunchedStep) -> list[Told]:
        """The same after a launch, once its tokens are here."""
        events: list[Told] = []
        for run, tokens in launched.read():
            run.ahead -= len(tokens)
            events += self._said(run, tokens)
        return events

    def _said(self, run: RunningSequence, tokens: Sequence[Token | None]) -> list[Told]:
        """Its next tokens, up to the one that ends it."""
        events: list[Told] = []
        params = run.job.sampling
        if len(run.ids) == len(run.job.prompt):
            self._keep(run)
        for token in tokens:
            if token is None:
                problem = run.matcher.problem if run.matcher is not None else ""
                return [*events, (run, Done("error", problem or "the model gave no usable number for the next token"))]
            if token.id in run.job.stop_ids and not params.ignore_stop:
                return [*events, (run, Done("stop"))]
            run.ids.append(token.id)
            events.append((run, token))
            if len(run.ids) - len(run.job.prompt) >= params.max_tokens or len(run.ids) >= self.limits.length:
                return [*events, (run, Done("length"))]
        return events
