"""Hook: the moments of a run others may act on. The trainer calls these, and no feature by name."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from erniekit.train.step import Launched, StepResult
    from erniekit.train.trainer import Trainer


class Hook:
    """A callback of the training loop. Every method may be left out; hooks are called in the order they were given.

    `trainer` has `model` (the module that is trained), `state` (step, tokens, best_metric, ...), `max_steps`, and
    `stop(reason)`, which ends the run after this step. A hook that raises ends the run with its error.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step, after a resume. trainer.state.step is the step that was resumed, or 0."""

    def phase(self, name: str) -> None:
        """What the loop does from now on: data, forward/backward, collective, update, eval, save, end."""

    def launched(self, trainer: Trainer, step: Launched) -> None:
        """The step's work is given to the device; what is done here comes next there, before the next step's.
        `step.bring(name, tensor)` has a tensor's values in `result.brought` of after_step."""

    def waits_for(self, trainer: Trainer, step: int) -> bool:
        """Whether the next step may only begin after this one's `after_step`. Unless a hook overrides it that is so: it
        may look at the weights, which on a card are the next step's already when a result comes late."""
        return type(self).after_step is not Hook.after_step

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """In order, each step once: its numbers are in `result`, the weights are those after its update. Called before
        the step is saved and evaluated."""

    def on_end(self, trainer: Trainer) -> None:
        """After the last step, before the result is written."""


class CollectGarbage(Hook):
    """`gc_interval`: Python's collector at fixed steps instead of whenever it likes, so that ranks pause together."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_start(self, trainer: Trainer) -> None:
        gc.disable()

    def waits_for(self, trainer: Trainer, step: int) -> bool:
        return False

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step % self.every == 0:
            gc.collect()

    def on_end(self, trainer: Trainer) -> None:
        gc.enable()
