"""The engine in the server's own process: continuous batching over a paged KV cache, on our models, CPU or GPU.

Built by serve/loaded_models.py. One thread computes; requests join and leave between two steps (continuous batching).
Models that share a base (it and its adapters) share the cache. A recorded step runs for all of them, a plain one for
each that has work.
scheduling.py decides what is computed when; plain_step.py and recorded.py compute. With recorded steps a launch is
made before the tokens of the one before it are read: a sequence that has ended is noticed one launch late, and what was
computed for it beyond its end is dropped.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
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
    ModelRemoved,
    QueueFull,
    Token,
    TokenStream,
)
from erniekit.serve.engines.delivery import SequenceEvent, deliver, put
from erniekit.serve.engines.exact_logprobs import hold_back
from erniekit.serve.engines.launched import LaunchedStep
from erniekit.serve.engines.model_changes import ComingModel, ModelChanges, ModelRefused
from erniekit.serve.engines.open_streams import OpenStreams
from erniekit.serve.engines.out_of_memory import reason
from erniekit.serve.engines.outcome import begins_again, take_states, take_tokens
from erniekit.serve.engines.paged import PagedCache, SequencePiece
from erniekit.serve.engines.plain_step import PlainSteps, remove_expert_capacity
from erniekit.serve.engines.recorded import RecordedSteps, is_plain
from erniekit.serve.engines.scheduling import EngineLimits as EngineLimits
from erniekit.serve.engines.scheduling import SequenceScheduler
from erniekit.serve.engines.sequence import RunningSequence, sequences_of
from erniekit.serve.engines.speculation import Planned
from erniekit.serve.engines.step_making import StepMaker
from erniekit.serve.engines.vision_input import FeatureCache

FAULTS = 3  # probes in a row that failed, after which the engine calls itself unhealthy
PROBE_S = 2.0  # between the probes of an engine that is unhealthy


class EmbeddedEngine(SequenceScheduler):
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
        super().__init__(cache, limits)
        self._maker = StepMaker(cache, limits, device)
        self.features = FeatureCache(limits.feature_bytes)
        for model in models.values():
            remove_expert_capacity(model.eval().requires_grad_(False))
        self.plain = PlainSteps(models, cache, self.features, limits.proposals)
        self.device = self.plain.device
        self.recorded = self._maker.make_or_warn(self.models)
        self._changes = ModelChanges()
        self._accepted = set(models)  # models that sequences may be submitted for
        self._streams = OpenStreams()
        self._lock = threading.Condition()
        self._stopping: str | None = None
        self._steps = self._faults = self._proposed = self._held = 0
        self._fault = ""
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    @property
    def models(self) -> dict[str, nn.Module]:
        return self.plain.models

    # --- called from the event loop, and from other threads

    def add_model(self, name: str, model: nn.Module) -> Future[None]:
        """On the tensors of the base that is served; done when sequences can be submitted for it."""
        with self._lock:
            done = self._changes.add(name, model)
            if self._stopping is not None:
                self._changes.fail(self._stopping)
            self._lock.notify()
        return done

    def remove_model(self, name: str) -> None:
        """Its sequences end as they would; none may be submitted any more."""
        with self._lock:
            self._accepted.discard(name)
            self._changes.going.add(name)
            self._lock.notify()

    def submit(self, *jobs: GenerationJob) -> TokenStream:
        assert all(0 < len(job.prompt) < self.limits.length for job in jobs)
        stream = TokenStream(jobs, CLIENT.get())
        runs = sequences_of(stream, asyncio.get_running_loop())
        with self._lock:
            if self._stopping is not None:
                put([(stream, k, Done("error", self._stopping)) for k in range(len(jobs))])
                return stream
            if any(job.model not in self._accepted for job in jobs):
                raise ModelRemoved
            if not self._waiting.accepts(stream, self._running, self.limits.sequences):
                raise QueueFull
            self._waiting.add(runs)
            self._streams.add(stream, runs)
            self._lock.notify()
        return stream

    def cancel(self, stream: TokenStream, number: int | None = None) -> None:
        with self._lock:
            for run in self._streams.open_runs(stream, number):
                self._streams.end(run)
                if run not in self._running:
                    self._waiting.leaving = True
            self._lock.notify()

    def load(self) -> Load:
        with self._lock:
            return Load(
                running=len(self._running),
                waiting=len(self._waiting),
                cache_used=self.cache.used,
                steps=self._steps,
                prefix_queries=self.cache.queried,
                prefix_hits=self.cache.shared,
                evicted=self._evicted,
                preempted=self._preempted,
                proposed=self._proposed,
                proposals_held=self._held,
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
                if self.recorded is not None:
                    self._record_or_warn(self.recorded)
                while self._wait():
                    self._step()
            message = self._stopping or message
        except BaseException as error:  # not of one request: nothing can go on
            warn(f"the engine ended: {type(error).__name__}: {error}")
            raise
        finally:
            with self._lock:
                self._stopping = message
                self._changes.fail(message)
                left = self._streams.end_all()
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
                if self._running or len(self._waiting) or self._launched or self._changes.due(self._used()):
                    return True
                # A load balancer sends nothing to an unhealthy engine: it probes itself, by a step without work.
                if not self._lock.wait(PROBE_S if self._faults >= FAULTS else None):
                    return True
            return False

    def _used(self) -> set[str]:
        """Models that have sequences; one that was cancelled has its place until the next `_wait`."""
        return self._streams.models() | {run.job.model for run in self._running}

    def _change_models(self) -> list[SequenceEvent]:
        """Those that come and go. What is launched is read first, and running sequences go on in the new steps."""
        with self._lock:
            if not self._changes.due(self._used()):
                return []
            self._waiting.drop_gone()  # cancelled since: their models may go now
            coming, gone = self._changes.take(self._used())
        events: list[SequenceEvent] = []
        while self._launched:
            events += self._read(self._launched.popleft())
        for name, model, _ in coming:
            remove_expert_capacity(model.eval().requires_grad_(False))
            self.plain.add(name, model)
        for name in gone:
            self.plain.remove(name)
        refused = self._renew_steps(coming)
        with self._lock:
            self._accepted.update(name for name, _, _ in coming if not refused and name not in self._changes.going)
        for _, _, done in coming:
            done.set_exception(ModelRefused(refused)) if refused else done.set_result(None)
        return events

    def _renew_steps(self, coming: Sequence[ComingModel]) -> str:
        """New recorded steps for a new set of models. Without those that come where that fails, such as for too little
        memory; why is returned then."""
        if self.recorded is None:
            return ""
        for run in self._running:
            self.recorded.leave(run)
            run.cached = min(run.cached, len(run.ids) - 1)
        refused = self._record(least=self.limits) if coming else ""
        for name, _, _ in coming if refused else ():
            self.plain.remove(name)
        if refused or not coming:
            self._record_or_warn()
        if self.recorded is not None:
            with self._lock:
                for run in self._running[self.limits.sequences :]:  # the steps before had larger batches
                    self._put_back(run)
            for run in self._running:
                self.recorded.join(run)
        return refused

    def _record(self, made: RecordedSteps | None = None, least: EngineLimits | None = None) -> str:
        """Everything these steps replay, or that of new ones; why there is nothing recorded. least: with fewer sizes
        than these limits need there is nothing, too."""
        try:
            if made is None:
                self.recorded = None  # its graphs' memory is the new ones'
                made = self._maker.make(self.models)
            self.limits = self._maker.record(made, least)
            self.recorded = made
            return ""
        except Exception as error:  # not kept: its frames hold memory
            self.recorded, self.limits = None, self._maker.asked
            return reason(error, self.limits.memory_key)

    def _record_or_warn(self, made: RecordedSteps | None = None) -> None:
        """A device that cannot record after all computes as one that never could."""
        if problem := self._record(made):
            warn(f"steps are not recorded, answers will be slow: {problem}")
        elif self.limits != self._maker.asked:
            warn(self._maker.left_out(self.limits))

    def _step(self) -> None:
        events = self._change_models()
        with self._lock:
            plan, steps = self._plan()
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
                    if self.limits.proposals:  # how far one held decides where the next launch begins
                        events += self._read(self._launched.popleft())
                        behind = 0
                else:
                    events += self._settle(part, outcome)
        while len(self._launched) > behind:
            if firsts := self._launched[0].read_firsts():  # not held back until the others' tokens are there
                deliver(self._remove_ended(self._taken(firsts), False))
            events += self._read(self._launched.popleft())
        current = self._remove_ended(events, bool(plan))
        if not worked:
            # The client's parameters may be why it failed: the engine is healthy if a plain token works.
            worked = self._probe(*([failed] if failed else self.models))
        self._faults = 0 if worked else self._faults + 1
        deliver(current)

    def _remove_ended(self, events: list[SequenceEvent], stepped: bool) -> list[SequenceEvent]:
        """Removes sequences that ended; returns the events of those whose clients still wait."""
        with self._lock:
            self._steps += stepped
            current = [(run, event) for run, event in events if not run.gone]
            for run, event in current:
                if isinstance(event, Done):
                    self._streams.end(run)
                    self._leave(run)
        return current

    def _guarded(
        self, name: str, group: list[Planned], steps: int, events: list[SequenceEvent]
    ) -> list[tuple[list[Planned], Any]]:
        """Recorded what can be, the rest plainly. events: of launches that have to be read because this one failed."""
        if self.recorded is None:
            return self._one_by_one(name, group)
        plain = [each for each in group if is_plain(*each)]
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
            if not any(other is run and isinstance(event, Done) for other, event in events):
                again.append((run, SequencePiece(run.ids, run.cached, len(run.ids), run.table, run.job.vision)))
        return [*out, *(result for one in again for result in self._one_by_one(one[0].job.model, [one]))]

    def _one_by_one(self, name: str, group: list[Planned]) -> list[tuple[list[Planned], Any]]:
        """A step that fails is tried again one by one: only the sequence that makes it fail is ended."""
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
        problem = self.plain.probe(names, propose=self.recorded is None)
        self._fault = problem or self._fault
        return problem is None

    def _forward(self, name: str, group: list[Planned]) -> list[list[Token | None]]:
        return self.plain.run(name, group, propose=self.recorded is None)

    def _settle(self, group: list[Planned], outcome: Any) -> list[SequenceEvent]:
        """Update the sequences after a plain step and collect the events for their clients."""
        if isinstance(outcome, Exception):
            return [(run, Done("error", "the engine failed on this request")) for run, _ in group]
        events: list[SequenceEvent] = []
        tokens = iter(outcome)
        for run, piece in group:
            known = len(run.ids)
            run.cached = min(piece.stop, known)
            if piece.stop < known:
                continue
            if run.pooled is not None:
                events += take_states(run)
                continue
            sampled = next(tokens)
            self._count_proposals(piece.stop - known, len(sampled) - 1)
            if not begins_again(run, piece, sampled):
                run.cached += len(sampled) - 1
                events += self._take(run, sampled)
        return events

    def _count_proposals(self, proposed: int, held: int) -> None:
        with self._lock:
            self._proposed += proposed
            self._held += held

    def _read(self, launched: LaunchedStep) -> list[SequenceEvent]:
        """The same after a launch, once its tokens are here."""
        events = self._taken(launched.read())
        self._time_steps(launched)
        self._count_proposals(launched.proposed, launched.held)
        return events

    def _taken(self, found: list[tuple[RunningSequence, list[Token | None]]]) -> list[SequenceEvent]:
        events: list[SequenceEvent] = []
        for run, tokens in found:
            run.ahead -= len(tokens)
            events += self._take(run, tokens)
        return events

    def _take(self, run: RunningSequence, tokens: Sequence[Token | None]) -> list[SequenceEvent]:
        begins = len(run.ids) == len(run.job.prompt)
        events = take_tokens(run, tokens, self.limits.length)
        if begins:
            self._keep(run)
        if self.limits.exact and run.job.sampling.logprobs is not None and run.job.vision is None:
            return hold_back(self.models[run.job.model], run, events, tokens)
        return events
