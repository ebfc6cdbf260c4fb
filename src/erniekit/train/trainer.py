"""The loop: next micro-batches, one step, then the hooks. Built by recipes/, which decides what is hooked in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from erniekit.checkpoint.state import TrainState
from erniekit.data.types import Batch
from erniekit.train.guard import FiniteGuard, Signals
from erniekit.train.hooks import Hook
from erniekit.train.step import StepResult, TrainStep


class Trainer:
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

    def fit(self) -> None:
        self.step.phase = self.phase
        for hook in self.hooks:
            hook.on_start(self)
        batches = self._batches_from(self.state.packs)
        while self.state.step < self.max_steps and not self.stop_reason:
            self.phase("data")
            micro = next(batches)
            result = self.step(micro, self.state.step + 1)
            if self._book(result, micro):
                self._go_back()
                batches = self._batches_from(self.state.packs)
                continue
            for hook in self.hooks:
                hook.after_step(self, result)
        for hook in self.hooks:
            hook.on_end(self)

    def phase(self, name: str) -> None:
        for hook in self.hooks:
            hook.phase(name)

    def _book(self, result: StepResult, micro: Sequence[Batch]) -> bool:
        """Counters move only here. True when the guard wants the last checkpoint back."""
        state = self.state
        state.step = result.step
        state.packs += self._packs_per_step
        state.tokens += result.tokens
        state.trained_tokens += result.trained_tokens
        if result.applied:
            state.updates += 1
            state.loss_sum += result.loss
        packs = tuple(p for batch in micro for p in batch.pack_indices)
        return self.guard.after(result, state, packs)

    def _go_back(self) -> None:
        """Weights and optimiser from the last checkpoint; the data goes on behind the bad stretch, once."""
        packs, skipped = self.state.packs, self.state.skipped_steps
        self.phase("restore")
        self._roll_back(self.state)
        self.state.packs, self.state.skipped_steps = packs, skipped
        self.state.rollbacks += 1
        self.state.bad_in_a_row = 0
