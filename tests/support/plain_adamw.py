"""The definition of an update in the place of its kernels: a CPU then trains the way a card does, results late.

`optimizer.fused = PlainAdamW()`, or for whole runs `results_come_late(monkeypatch)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from erniekit.kernels.adamw import UpdateCheck, check_reference, norm_reference, reference
from erniekit.kernels.adamw_slot import Rates, Slot
from erniekit.optim import adamw


class PlainAdamW:
    def update(
        self,
        key: str,
        slots: Sequence[Slot],
        rates: Rates,
        scale: torch.Tensor | None = None,
        good: torch.Tensor | None = None,
        count: torch.Tensor | None = None,
    ) -> None:
        reference(slots, rates, scale, good, count)

    def norm(self, key: str, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        return norm_reference(grads)

    def check(
        self, key: str, grad: torch.Tensor, last: torch.Tensor | None, sound: torch.Tensor, limit: float
    ) -> UpdateCheck:
        return check_reference(norm_reference([grad]), last, sound, limit)


def results_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "fits", lambda tensors: True)
    monkeypatch.setattr(adamw, "FusedAdamW", PlainAdamW)
