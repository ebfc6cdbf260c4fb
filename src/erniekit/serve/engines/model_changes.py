"""Models added and removed while an engine runs: requested in any thread, done by the engine's between two steps.

Used by embedded.py. A model that is to go stays until its last sequence has ended; no other sequence is touched.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import nn

ComingModel = tuple[str, nn.Module, Future[None]]  # its name, the model, done when it is served


class ModelRefused(Exception):
    """The engine cannot serve the model beside those it has; nothing else has changed."""


@dataclass
class ModelChanges:
    """All under the engine's lock."""

    coming: list[ComingModel] = field(default_factory=list)
    going: set[str] = field(default_factory=set)

    def add(self, name: str, model: nn.Module) -> Future[None]:
        done: Future[None] = Future()
        self.coming.append((name, model, done))
        return done

    def due(self, used: Collection[str]) -> bool:
        """Whether something can be done now; used: models of sequences that run or wait."""
        return bool(self.coming) or any(name not in used for name in self.going)

    def take(self, used: Collection[str]) -> tuple[list[ComingModel], list[str]]:
        """Models to add, and names to remove."""
        coming, self.coming = self.coming, []
        gone = sorted(name for name in self.going if name not in used)
        self.going.difference_update(gone)
        return coming, gone

    def fail(self, message: str) -> None:
        for _, _, done in self.coming:
            done.set_exception(RuntimeError(message))
        self.coming = []
