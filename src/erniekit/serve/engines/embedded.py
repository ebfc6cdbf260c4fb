"""The engine in the server's own process: continuous batching over a paged KV cache, on our models, CPU or GPU.

Built by serve/loaded_models.py. One thread computes; requests join and leave between two steps (continuous batching).
Models that share a base (it and its adapters) share the cache, and a step runs once for each of them that has work.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from erniekit.data.types import More
from erniekit.log import warn
from erniekit.models.layers.router import Router
from erniekit.serve.engines.base import (
    CLIENT,
    Done,
    Event,
    GenerationJob,
    Load,
    QueueFull,
    SamplingParams,
    Token,
    TokenStream,
)
from erniekit.serve.engines.fair_queue import FairQueue, in_turn, over_share, youngest_of_largest
from erniekit.serve.engines.paged import PagedAttention, PagedCache, SequencePiece, Step, install
from erniekit.serve.engines.sampler import sample
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


class EmbeddedEngine:
    """models: by name, all of one shape and on one device; their layers are given the paged cache."""

    def __init__(self, models: Mapping[str, nn.Module], cache: PagedCache, limits: EngineLimits) -> None:
        if cache.blocks < cache.blocks_for(limits.length):
            raise ValueError("the cache must hold one sequence of full length")
        self.models, self.cache, self.limits = dict(models), cache, limits
        self.features = FeatureCache(limits.feature_bytes)
        self._attention: dict[str, list[PagedAttention]] = {}
        for name, model in self.models.items():
            _remove_expert_capacity(model.eval().requires_grad_(False))
            self._attention[name] = install(model, cache)
        self.device = next(next(iter(self.models.values())).parameters()).device
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
                _put([(stream, k, Done("error", self._stopping)) for k in range(len(jobs))])
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
                self._waiting.drop_gone()
                if self._running or len(self._waiting):
                    return True
                # A load balancer sends nothing to an unhealthy engine: it probes itself, by a step without work.
                if not self._lock.wait(PROBE_S if self._faults >= FAULTS else None):
                    return True
            return False

    def _step(self) -> None:
        with self._lock:
            plan = self._plan()
        events: list[tuple[RunningSequence, Event]] = []
        worked, failed = False, ""
        for name in dict.fromkeys(run.job.model for run, _ in plan):
            group = [(run, piece) for run, piece in plan if run.job.model == name]
            for part, outcome in self._guarded(name, group):
                if isinstance(outcome, Exception):
                    failed = name
                else:
                    worked = True
                events += self._settle(part, outcome)
        with self._lock:
            self._steps += bool(plan)
            told = [(run, event) for run, event in events if not run.gone]
            for run, event in told:
                if isinstance(event, Done):
                    run.gone = True
                    self._leave(run)
                    self._forget(run.stream)
        if not worked:
            # What a client asked for may be why it failed: the engine is sound if a plain token works.
            worked = self._probe(*([failed] if failed else self.models))
        self._faults = 0 if worked else self._faults + 1
        self._deliver(told)

    def _plan(self) -> list[tuple[RunningSequence, SequencePiece]]:
        """What this step computes: sequences that decode first, then chunked prefill, up to the token budget."""
        while (new := self._waiting.next(self._running)) is not None and self._admit(new):
            self._waiting.take(new)
            self._running.append(new)
        budget = self.limits.tokens
        ends: dict[RunningSequence, int] = {}
        for run in sorted(in_turn(self._running), key=lambda run: len(run.ids) - run.cached > 1):
            todo = len(run.ids) - run.cached
            count = todo if todo == 1 else min(todo, budget)
            if run in self._running and count > 0 and self._room(run, run.cached + count, ends):
                ends[run] = run.cached + count
                budget -= count
        return [(run, SequencePiece(run.ids, run.cached, end, run.table, run.job.vision)) for run, end in ends.items()]

    def _admit(self, new: RunningSequence) -> bool:
        """Whether it can run now. Those of clients and requests that hold more than their share wait again for it."""
        left, free, blocks = list(self._running), len(self.cache.free), self.cache.blocks_for(len(new.ids))
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
        """It waits again, and its cache is recomputed; its tokens and its random numbers stay."""
        self._leave(run)
        run.cached = 0
        self._waiting.put_back(run)

    def _leave(self, run: RunningSequence) -> None:
        if run in self._running:
            self._running.remove(run)
        self.cache.release(run.table)

    def _guarded(self, name: str, group: list[tuple[RunningSequence, SequencePiece]]) -> list[tuple[list[Any], Any]]:
        """A step that fails is tried again one by one: only who brings it down pays for it."""
        try:
            return [(group, self._forward(name, group))]
        except Exception as error:
            if len(group) == 1:
                self._fault = f"{type(error).__name__}: {error}"
                warn(f"a request failed in the engine: {self._fault}")
                return [(group, error)]
            return [result for one in group for result in self._guarded(name, [one])]

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

    def _forward(self, name: str, group: Sequence[tuple[RunningSequence, SequencePiece]]) -> list[Token | None]:
        model: Any = self.models[name]
        step = Step.of([piece for _, piece in group], self.cache.size, self.device)
        for inner in self._attention[name]:
            inner.step = step
        embedded = self._show(name, model.embed_ids(step.tokens), group)
        hidden = model.run_layers(embedded, model.context(step.positions, more=More(modality=step.modality)))
        sampled = [k for k, (run, piece) in enumerate(group) if piece.stop == len(run.ids)]
        if not sampled:
            return []
        last = model.norm(hidden[0, step.last[sampled]])
        logits = model.output.logits(last, model.head_weight(), model.head_bias_or_none())
        return sample(logits, [group[k][0].row() for k in sampled])

    def _show(
        self, name: str, x_1TH: torch.Tensor, group: Sequence[tuple[RunningSequence, SequencePiece]]
    ) -> torch.Tensor:
        """The embeddings with the features of pictures in the places of their tokens."""
        model, features, places, at = self.models[name], [], [], 0
        for run, piece in group:
            if run.features is not None:
                read = run.features.read(piece.start, piece.stop, name, model, self.features, self.device)
                for found, where in read:
                    features.append(found)
                    places.append(torch.from_numpy(where - piece.start + at))
                if piece.stop >= len(run.job.prompt):
                    run.features.forget()
            at += piece.stop - piece.start
        if not features:
            return x_1TH
        result: torch.Tensor = model.places(x_1TH, torch.cat(features), torch.cat(places).to(self.device))  # type: ignore[operator]
        return result

    def _settle(
        self, group: list[tuple[RunningSequence, SequencePiece]], outcome: Any
    ) -> list[tuple[RunningSequence, Event]]:
        """The sequences after the step, and what their clients are told."""
        if isinstance(outcome, Exception):
            return [(run, Done("error", "the engine failed on this request")) for run, _ in group]
        events: list[tuple[RunningSequence, Event]] = []
        tokens = iter(outcome)
        for run, piece in group:
            is_sampled = piece.stop == len(run.ids)
            run.cached = piece.stop
            if not is_sampled:
                continue
            token, params = next(tokens), run.job.sampling
            if token is None:
                events.append((run, Done("error", "the model gave no usable number for the next token")))
            elif token.id in run.job.stop_ids and not params.ignore_stop:
                events.append((run, Done("stop")))
            else:
                run.ids.append(token.id)
                events.append((run, token))
                if len(run.ids) - len(run.job.prompt) >= params.max_tokens or len(run.ids) >= self.limits.length:
                    events.append((run, Done("length")))
        return events

    def _deliver(self, events: Sequence[tuple[RunningSequence, Event]]) -> None:
        """One call into each event loop for a whole step."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[TokenStream, int, Event]]] = {}
        for run, event in events:
            assert run.loop is not None
            by_loop.setdefault(run.loop, []).append((run.stream, run.number, event))
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put, batch)
            except RuntimeError:  # that loop is closed
                pass


def _put(batch: Sequence[tuple[TokenStream, int, Event]]) -> None:
    for stream, number, event in batch:
        stream.events.put_nowait((number, event))


def _remove_expert_capacity(model: nn.Module) -> None:
    """Expert capacity is a rule of training: in serving, a token's experts must not depend on the other requests."""
    for module in model.modules():
        if isinstance(module, Router):
            module.capacity = module.most = None
