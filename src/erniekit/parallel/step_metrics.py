"""StepMetrics: numbers of a step besides its loss (rewards, router losses), summed on the device and over the ranks.

Losses add to it, engine.py reduces it once a step. The names are fixed, so that ranks with different layers agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from erniekit.parallel.reduce import all_reduce


class StepMetrics:
    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self._row = {name: k for k, name in enumerate(self.names)}
        self._sums = torch.zeros(len(self.names), 2, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, name: str, total: torch.Tensor, count: torch.Tensor | float) -> None:
        """`total` of `count` things; their mean over the step and all ranks is reported."""
        row = self._sums[self._row[name]]
        row[0] += total.detach()
        row[1] += count

    def reduce(self, group: ProcessGroup | None) -> torch.Tensor:
        """The means in the order of `names`, NaN where nothing was added; on the device. Sums start over."""
        sums = self._sums.clone()
        self._sums.zero_()
        if group is not None:
            all_reduce(sums, group)
        return sums[:, 0] / sums[:, 1]
