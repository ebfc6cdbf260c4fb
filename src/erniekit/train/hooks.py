"""Hook: the moments of a run others may act on. The trainer knows these, and no feature by name."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from erniekit.train.step import Launched, StepResult
    from erniekit.train.trainer import Trainer


class Hook:
    """Every method may be left out. Called in the order the hooks were given."""

    def on_start(self, trainer: Trainer) -> None: ...

    def phase(self, name: str) -> None: ...  # what the loop is doing from now on: data, forward/backward, save, ...

    def launched(self, trainer: Trainer, step: Launched) -> None:
        """The step's work is given to the device; what is done here comes next there, before the next step's."""

    def waits_for(self, trainer: Trainer, step: int) -> bool:
        """Whether the next step may only begin after this one's `after_step`. Unless a hook says otherwise it does: it
        may look at the weights, which on a card are the next step's already when a result comes late."""
        return type(self).after_step is not Hook.after_step

    def after_step(self, trainer: Trainer, result: StepResult) -> None: ...  # in order, each step once

    def on_end(self, trainer: Trainer) -> None: ...


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
