"""Which sequences run and what a step computes of them: admission, chunked prefill, bursts, eviction. Base of
embedded.py's engine.

All of it under the engine's lock, in its thread.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from erniekit.serve.engines.fair_queue import FairQueue, in_turn, over_share, youngest_of_largest
from erniekit.serve.engines.launched import LaunchedStep
from erniekit.serve.engines.paged import PagedCache, SequencePiece
from erniekit.serve.engines.recorded import RecordedSteps, needs_history
from erniekit.serve.engines.sequence import RunningSequence
from erniekit.serve.engines.speculation import Planned


def _with_proposal(run: RunningSequence, end: int) -> list[int]:
    """Its tokens, and those of its proposal up to `end`."""
    return [*run.ids, *run.proposals[: end - len(run.ids)]] if run.proposals and end > len(run.ids) else run.ids


@dataclass(frozen=True)
class EngineLimits:
    sequences: int = 8  # at once
    tokens: int = 384  # of prompts, in one step
    length: int = 2048  # prompt and answer
    queue: int = 64  # sequences that may wait
    feature_bytes: int = 512 << 20  # of pictures, kept in host memory
    burst: int = 4  # tokens of each sequence in one launch of recorded steps, while no prompt is read
    exact: bool = False  # log-probabilities are those of training's forward pass, and come with the end of an answer
    proposals: int = 0  # tokens that the model's MTP layer proposes for each sequence and step; 0: none
    memory_key: str = "gpu_memory_utilization"  # what a user lowers where recorded steps have too little memory


BURST_S = 0.012  # most seconds of a burst: a prompt that comes waits for two of them


class SequenceScheduler:
    """recorded: the steps that sequences take a slot of, where there are any."""

    recorded: RecordedSteps | None

    def __init__(self, cache: PagedCache, limits: EngineLimits) -> None:
        self.cache, self.limits = cache, limits
        self._launched: deque[LaunchedStep] = deque()
        self._waiting = FairQueue(limits.queue)
        self._running: list[RunningSequence] = []
        self._evicted = self._preempted = 0
        self._step_s = self._read_at = 0.0  # seconds of a recorded step of late; when a launch was read last

    def _plan(self) -> tuple[list[Planned], int]:
        """What this step computes: sequences that decode first, then chunked prefill, up to the token budget; and how
        many tokens of each that decodes."""
        while (new := self._waiting.next(self._running)) is not None and self._admit(new):
            self._waiting.take(new)
            self._running.append(new)
            if new.job.vision is None and new.job.pooling != "mean":  # a mean is of all states
                new.cached = self.cache.share(new.ids, new.job.prefix_key, new.table)
                if not new.generated:
                    new.stream.cached[new.number] = new.cached
            if self.recorded is not None:
                self.recorded.join(new)
        open_ends = [run for run in self._running if run.left > 0 and run.length < self.limits.length]
        if self._launched and any(needs_history(run) for run in open_ends):
            return [], 1  # what is in flight is read first
        steps = self._burst(open_ends)
        budget = self.limits.tokens
        ends: dict[RunningSequence, int] = {}
        for run in sorted(in_turn(open_ends), key=lambda run: run.length - run.cached > 1):
            todo = run.length - run.cached
            proposed = self._verifiable(run) if todo == 1 else 0
            count = self._most_of(steps) if run.placed else 1 + proposed if todo == 1 else min(todo, budget)
            end = min(run.cached + count, self.limits.length)
            # Behind the tokens of this step the proposals of the next have their places.
            last = min(end + self.limits.proposals, self.limits.length)
            if run in self._running and count > 0 and self._reserve_blocks(run, last, ends):
                ends[run] = end
                budget -= 0 if run.placed else count
        plan = [
            (run, SequencePiece(_with_proposal(run, end), run.cached, end, run.table, run.job.vision))
            for run, end in ends.items()
        ]
        return sorted(plan, key=lambda planned: not planned[1].decodes), steps

    def _verifiable(self, run: RunningSequence) -> int:
        """Tokens of its proposal that could be part of the answer, with another behind them."""
        room = min(run.left, self.limits.length - run.length) - 1
        return max(0, min(len(run.proposals), room))

    def _most_of(self, steps: int) -> int:
        """Tokens of a sequence in so many recorded steps."""
        return steps * (1 + self.limits.proposals)

    def _burst(self, runs: list[RunningSequence]) -> int:
        """Tokens of each that decodes: several while no prompt is being read, in so short a time that the next prompt
        does not wait for long. Who waits still waits for a place."""
        if self.recorded is None or not all(run.placed for run in runs):
            return 1
        if any(needs_history(run) for run in runs):
            return 1
        most = min((min(run.left, self.limits.length - run.length) for run in runs), default=1)
        soon = int(BURST_S / self._step_s) if self._step_s else self.limits.burst
        return max(1, min(self.limits.burst, most // self._most_of(1), soon))

    def _time_steps(self, launched: LaunchedStep) -> None:
        """Of a launch that was just read: the device began it at once, or when it was done with the one before."""
        now = time.perf_counter()
        if launched.going and launched.decodes_only:
            each = (now - max(launched.launched, self._read_at)) / launched.steps
            self._step_s = each if not self._step_s else (3 * self._step_s + each) / 4
        self._read_at = now

    def _admit(self, new: RunningSequence) -> bool:
        """Whether it can run now. Those of clients and requests that hold more than their share wait again for it."""
        left, free, blocks = list(self._running), self.cache.free_blocks, self.cache.blocks_for(len(new.ids))
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

    def _reserve_blocks(self, run: RunningSequence, length: int, planned: dict[RunningSequence, int]) -> bool:
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
            run.proposals = []
            self._keep(run)
        self.cache.release(run.table)

    def _keep(self, run: RunningSequence) -> None:
        """Shares its computed blocks with sequences that begin with the same tokens. Not those that may hold NaN: a
        token that gives it spoils the places before it in the same piece, too."""
        if run.job.vision is None:
            self.cache.keep(run.ids[: min(run.cached, run.proven)], run.job.prefix_key, run.table)
