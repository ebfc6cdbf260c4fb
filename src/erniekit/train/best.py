"""The best checkpoint so far: saved when it is found, spared by rotation, and forgotten when its save failed.

Hooked in by recipes/training.py where load_best_model_at_end is set; EvalHook calls `keep`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from erniekit.log import warn
from erniekit.train.hooks import Hook, TrainingLoop
from erniekit.train.save import SaveHook

if TYPE_CHECKING:
    from erniekit.train.step import StepResult

Best = tuple[float | None, int | None]  # its metric and its step


class KeepBest(Hook):
    """Only what is on disk is the best: after a failed save the one before is, and the next evaluation is compared
    with that one. All ranks learn how a save went, so all of them decide alike."""

    def __init__(self, save: SaveHook) -> None:
        self.save, self.saver = save, save.saver
        self._on_disk: Best = (None, None)
        self._pending: Best | None = None  # its save has not ended, or its outcome was not read yet

    def on_start(self, trainer: TrainingLoop) -> None:
        self._on_disk = _best_of(trainer)

    def waits_for(self, trainer: TrainingLoop, step: int) -> bool:
        return False

    def keep(self, trainer: TrainingLoop) -> None:
        if self._pending is not None:  # overtaken by a better one, which is saved once that save has ended
            self.saver.saves.wait()
            self._lands()
        self._pending = _best_of(trainer)
        self.saver.manager.protect(trainer.state.step)
        self.save.save(trainer)
        self._confirm(trainer)

    def after_step(self, trainer: TrainingLoop, result: StepResult) -> None:
        self._confirm(trainer)

    def on_end(self, trainer: TrainingLoop) -> None:
        self.saver.saves.wait()
        self._confirm(trainer)

    def _confirm(self, trainer: TrainingLoop) -> None:
        """Once its save has ended."""
        if self._pending is None or self.saver.saves.in_flight:
            return
        pending = self._pending
        if self._lands() or pending != _best_of(trainer):  # the run may have gone back to an earlier checkpoint
            return
        before = "none" if self._on_disk[1] is None else f"checkpoint-{self._on_disk[1]}"
        warn(f"the best so far, of step {pending[1]}, was not saved; the best on disk: {before}")
        trainer.state.best_metric, trainer.state.best_step = self._on_disk

    def _lands(self) -> bool:
        """Whether the pending one is on disk, now that its save has ended."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        landed = self.saver.saves.published(pending[1] or 0)
        self._on_disk = pending if landed else self._on_disk
        return landed


def _best_of(trainer: TrainingLoop) -> Best:
    return trainer.state.best_metric, trainer.state.best_step
