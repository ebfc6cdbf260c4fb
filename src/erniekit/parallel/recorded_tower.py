"""A frozen vision tower replayed as CUDA graphs, one for each size of picture: its many short launches take the host
longer than the device. Used by apply.py, where layers are recorded too (cuda_graphs.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from erniekit.devices.base import Device

SEEN = 3  # pictures of a size before it is recorded: most sizes of a mixed data set come once
MOST = 16  # sizes that are recorded; others are launched

Grid = tuple[int, int, int]


class Recording(NamedTuple):
    rows: torch.Tensor  # [P, C * p * p], normalised: what is replayed reads here
    features: torch.Tensor  # [P, W]: and writes here
    replay: Callable[[], None]


class RecordedTower:
    """In place of a tower's forward. Each picture is computed by itself, as the tower does where features are kept."""

    def __init__(self, tower: Any, device: Device) -> None:
        self.tower, self.device = tower, device
        self.recorded: dict[Grid, Recording] = {}
        self.chosen: set[Grid] = set()  # sizes that are recorded when they come
        self.seen: Counter[Grid] = Counter()

    def __call__(self, patches: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        if not grids or not self.frozen:
            result: torch.Tensor = self.tower(patches, grids)
            return result
        with torch.no_grad():
            rows = self.tower.normalised(patches).split([t * h * w for t, h, w in grids])
            replayed = [self._is_replayed(grid) for grid in grids]
            launched = iter(self._launched([k for k, one in enumerate(replayed) if not one], rows, grids))
            pairs = zip(rows, grids, replayed)
            return torch.cat([self._replayed(part, grid) if one else next(launched) for part, grid, one in pairs])

    @cached_property
    def frozen(self) -> bool:
        """Looked up once, when the first batch comes: which weights train is settled by then."""
        return not any(param.requires_grad for param in self.tower.parameters())

    def _is_replayed(self, grid: Grid) -> bool:
        self.seen[grid] += 1
        if self.seen[grid] >= SEEN and len(self.chosen) < MOST:
            self.chosen.add(grid)
        return grid in self.chosen

    def _launched(self, which: list[int], rows: Sequence[torch.Tensor], grids: list[Grid]) -> Sequence[torch.Tensor]:
        """Pictures of rare sizes, all at once."""
        if not which:
            return ()
        own = [grids[k] for k in which]
        apart = tuple(len(rows[k]) for k in which)
        together = torch.cat([rows[k] for k in which])
        features: torch.Tensor = self.tower.through_blocks(together, self.tower.chunks_of(own, together.device), apart)
        parts: Sequence[torch.Tensor] = features.split(apart)
        return parts

    def _replayed(self, rows: torch.Tensor, grid: Grid) -> torch.Tensor:
        if grid not in self.recorded:
            self.recorded[grid] = self._record(rows, grid)
        found = self.recorded[grid]
        found.rows.copy_(rows)
        found.replay()
        return found.features.clone()  # the next picture of this size is written there

    def _record(self, rows: torch.Tensor, grid: Grid) -> Recording:
        given, chunks = rows.clone(), self.tower.chunks_of([grid], rows.device)
        features = torch.empty(len(rows), self.tower.shape.width, dtype=given.dtype, device=given.device)

        def work() -> None:
            features.copy_(self.tower.through_blocks(given, chunks))

        return Recording(given, features, self.device.recorded(work))
