"""Hook: the moments of a run others may act on. The trainer calls these, and no feature by name."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import nn

    from erniekit.checkpoint.state import TrainState
    from erniekit.train.guard import Signals
    from erniekit.train.step import Launched, StepResult


class TrainingLoop(Protocol):
    """The training loop, as hooks see it: `model`, `state` (step, tokens, best_metric, ...), `max_steps`, `stop`."""

    state: TrainState
    max_steps: int
    signals: Signals  # that asked this process to end
    stop_reason: str  # of `stop`; empty: the run goes on

    @property
    def ahead(self) -> bool:
        """Whether a step was launched behind the one that is being counted: the weights are no longer this one's."""

    @property
    def model(self) -> nn.Module:
        """What is trained; in a pipeline this rank's first stage."""

    def stop(self, reason: str) -> None:
        """Ends the run after this step, as finished: with a save and a result. On several ranks all must call it."""

    def phase(self, name: str) -> None:
        """What the loop does from now on, for all hooks."""


class Hook:
    """A callback of the training loop. Every method may be left out; hooks are called in the order they were given.

    `trainer` has `model` (the module that is trained), `state` (step, tokens, best_metric, ...), `max_steps`, and
    `stop(reason)`, which ends the run after this step. A hook that raises ends the run with its error.
    """

    def on_start(self, trainer: TrainingLoop) -> None:
        """Before the first step, after a resume. trainer.state.step is the step that was resumed, or 0."""

    def phase(self, name: str) -> None:
        """What the loop does from now on: data, forward/backward, collective, update, eval, save, end."""

    def launched(self, trainer: TrainingLoop, step: Launched) -> None:
        """The step's work is given to the device; what is done here comes next there, before the next step's.
        `step.bring(name, tensor)` has a tensor's values in `result.brought` of after_step."""

    def waits_for(self, trainer: TrainingLoop, step: int) -> bool:
        """Whether the next step may only begin after this one's `after_step`. Unless a hook overrides it that is so: it
        may look at the weights, which on a card are the next step's already when a result comes late."""
        return type(self).after_step is not Hook.after_step

    def after_step(self, trainer: TrainingLoop, result: StepResult) -> None:
        """In order, each step once: its numbers are in `result`, the weights are those after its update. Called before
        the step is saved and evaluated."""

    def on_end(self, trainer: TrainingLoop) -> None:
        """After the last step, before the result is written."""


class CollectGarbage(Hook):
    """`gc_interval`: Python's collector at fixed steps instead of whenever it likes, so that ranks pause together."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_start(self, trainer: TrainingLoop) -> None:
        gc.disable()

    def waits_for(self, trainer: TrainingLoop, step: int) -> bool:
        return False

    def after_step(self, trainer: TrainingLoop, result: StepResult) -> None:
        if result.step % self.every == 0:
            gc.collect()

    def on_end(self, trainer: TrainingLoop) -> None:
        gc.enable()
