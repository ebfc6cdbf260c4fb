"""Session: what a Python session adds to a run's keys: rows, callbacks, a loss. Made by api/training.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from erniekit.data.given_rows import GivenRows
from erniekit.errors import ConfigError
from erniekit.losses.own import TokenLoss
from erniekit.losses.own_preference import PairLoss
from erniekit.parallel.mesh import World
from erniekit.track import Tracker
from erniekit.train.hooks import Hook, TrainingLoop
from erniekit.train.step import StepResult


@dataclass(frozen=True)
class Session:
    hooks: tuple[Hook, ...] = ()
    trackers: tuple[Tracker, ...] = ()
    loss: TokenLoss | PairLoss | None = None
    rows: tuple[GivenRows, ...] = ()

    def write_rows(self, output: Path, world: World) -> None:
        """Into the run's folder, before they are read. All ranks call it."""
        if not self.rows:
            return
        if world.is_main:
            for rows in self.rows:
                rows.write(output)
        world.gather(None)


class StepFunction(Hook):
    """A plain function as a callback: it is called with each step's StepResult."""

    def __init__(self, function: Callable[[StepResult], Any]) -> None:
        self.function = function

    def waits_for(self, trainer: TrainingLoop, step: int) -> bool:
        return False  # it gets only the step's numbers, not the weights

    def after_step(self, trainer: TrainingLoop, result: StepResult) -> None:
        self.function(result)


def sorted_callbacks(callbacks: Sequence[Any]) -> tuple[tuple[Hook, ...], tuple[Tracker, ...]]:
    """Hooks act on the loop, trackers are given what is logged; functions become hooks."""
    if isinstance(callbacks, (Hook, Tracker)) or callable(callbacks):
        callbacks = [callbacks]
    hooks: list[Hook] = []
    trackers: list[Tracker] = []
    for given in callbacks:
        if isinstance(given, Hook):
            hooks.append(given)
        elif isinstance(given, Tracker):
            trackers.append(given)
        elif callable(given) and not isinstance(given, type):
            hooks.append(StepFunction(given))
        else:
            made = (
                f"the class {given.__name__}"
                if isinstance(given, type)
                else f"an object of type {type(given).__name__}"
            )
            raise ConfigError(
                f"{made} is not a callback",
                where="callbacks",
                fix="an instance of erniekit.Hook or erniekit.Tracker, or a function of one StepResult",
            )
    return tuple(hooks), tuple(trackers)
