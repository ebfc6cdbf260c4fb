"""The loop: next micro-batches, one step, then the hooks. Built by recipes/, which decides what is hooked in.

On one card a step is counted after the next one's launch, so that the card never waits for the host; where a hook needs
it (an evaluation, a save), and at the end, at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from erniekit.checkpoint.state import TrainState
from erniekit.data.types import Batch
from erniekit.train.guard import FiniteGuard, Signals
from erniekit.train.hooks import Hook
from erniekit.train.step import Launched, StepResult, TrainStep


class Trainer:
    """The training loop. Hooks are given it as the TrainingLoop that hooks.py describes."""

    def __init__(
        self,
        step: TrainStep,
        state: TrainState,
        batches_from: Callable[[int], Iterator[Sequence[Batch]]],
        max_steps: int,
        packs_per_step: int,
        hooks: Sequence[Hook],
        guard: FiniteGuard,
        signals: Signals,
        roll_back: Callable[[TrainState], None],
    ) -> None:
        """`batches_from(pack)` iterates steps from a global pack; `roll_back` restores the last checkpoint."""
        self.step, self.state, self.max_steps, self.hooks = step, state, max_steps, hooks
        self.guard, self.signals = guard, signals
        self.stop_reason = ""
        self.began_at = (state.step, state.packs)  # this process's own share is what rates are made of
        self._batches_from, self._packs_per_step, self._roll_back = batches_from, packs_per_step, roll_back
        self._in_flight: deque[tuple[Launched, tuple[int, ...]]] = deque()  # steps and their packs, not counted yet

    @property
    def ahead(self) -> bool:
        return bool(self._in_flight)

    @property
    def model(self) -> nn.Module:
        return self.step.engine.model

    def stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason

    def fit(self) -> None:
        self.step.phase = self.phase
        for hook in self.hooks:
            hook.on_start(self)
        batches = self._batches_from(self.state.packs)
        while (step := self.state.step + len(self._in_flight) + 1) <= self.max_steps and not self.stop_reason:
            self.phase("data")
            self._launch(next(batches), step)
            if self._complete(leave=1) or (self._must_wait(step) and self._complete()):
                batches = self._batches_from(self.state.packs)
        self._complete()
        for hook in self.hooks:
            self.phase("end")
            hook.on_end(self)
        self.phase("end")

    def _launch(self, micro: Sequence[Batch], step: int) -> None:
        launched = self.step.launch(micro, step)
        for hook in self.hooks:
            hook.launched(self, launched)
        launched.send()
        self._in_flight.append((launched, tuple(p for batch in micro for p in batch.pack_indices)))

    def _must_wait(self, step: int) -> bool:
        return not self.step.late or step == self.max_steps or any(hook.waits_for(self, step) for hook in self.hooks)

    def _complete(self, leave: int = 0) -> bool:
        """Completes steps until so many are left in flight. True when the last checkpoint was restored instead: what
        was launched since is dropped, and its data is to be read again."""
        while len(self._in_flight) > leave:
            if self.step.late:
                self.phase("device")
            launched, packs = self._in_flight.popleft()
            result = launched.result()
            if self._count(result, packs):
                self._in_flight.clear()
                self._restore()
                return True
            for hook in self.hooks:
                hook.after_step(self, result)
        return False

    def phase(self, name: str) -> None:
        for hook in self.hooks:
            hook.phase(name)

    def _count(self, result: StepResult, packs: tuple[int, ...]) -> bool:
        """Counters move only here. True when the guard requests the last checkpoint."""
        state = self.state
        state.step = result.step
        state.packs += self._packs_per_step
        state.tokens += result.tokens
        state.trained_tokens += result.trained_tokens
        state.updates += result.applied or result.partly  # as the optimiser counts
        if result.applied:
            state.loss_sum += result.loss
        return self.guard.after(result, state, packs)

    def _restore(self) -> None:
        """Weights and optimiser from the last checkpoint; the data goes on behind the bad stretch, once."""
        packs, skipped = self.state.packs, self.state.skipped_steps
        self.phase("restore")
        self._roll_back(self.state)
        self.state.packs, self.state.skipped_steps = packs, skipped
        self.state.rollbacks += 1
        self.state.bad_in_a_row = 0
