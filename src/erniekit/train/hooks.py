"""Hook: the moments of a run others may act on. The trainer knows these, and no feature by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from erniekit.train.step import StepResult
    from erniekit.train.trainer import Trainer


class Hook:
    """Every method may be left out. Called in the order the hooks were given."""

    def on_start(self, trainer: Trainer) -> None: ...

    def after_step(self, trainer: Trainer, result: StepResult) -> None: ...

    def on_end(self, trainer: Trainer) -> None: ...
