"""Muon for the matrices inside the layers, AdamW for everything else. Made by recipes/optimiser.py.

A matrix steps along the orthogonal direction of its averaged gradient (kernels/newton_schulz.py), the parts of a fused
tensor and the experts each by themselves, as they would if stored apart. Embeddings, head, norms, biases and routers
are AdamW's. The numbers are torch.optim.Muon's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Protocol

import torch

from erniekit.kernels.adamw_slot import Rates
from erniekit.kernels.newton_schulz import orthogonalised
from erniekit.optim.adamw import AdamW, own_memory

MOMENTUM = "momentum"  # as checkpoints call it


class Spread(Protocol):
    """Where a rank holds only a piece of a tensor: parallel/whole_tensors.py."""

    def whole(self, name: str, piece: torch.Tensor) -> torch.Tensor: ...

    def piece(self, name: str, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class MuonSettings:
    momentum: float = 0.95
    # of a step's size: as large as AdamW's usual one (0.2 in root mean square; Moonlight, 2025), or Jordan's own scale
    match_adamw: bool = True
    # Of the directions. A run in fp32 has them in fp32: bf16 would make a last bit that differs between layouts a
    # difference of 0.4 % in one number of the update.
    dtype: torch.dtype = torch.bfloat16

    def factor(self, rows: int, columns: int) -> float:
        return 0.2 * sqrt(max(rows, columns)) if self.match_adamw else sqrt(max(1.0, rows / columns))


class Muon(AdamW):
    def __init__(
        self,
        *args: Any,
        matrices: Mapping[str, tuple[int, ...]],
        settings: MuonSettings,
        spread: Spread,
        **options: Any,
    ) -> None:
        """matrices: of each tensor that Muon updates, the rows of the matrices stacked in it; repeated to its end."""
        self.matrices, self.settings, self.spread = matrices, settings, spread
        super().__init__(*args, **options)

    def _kinds(self, name: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        if name not in self.matrices:
            return super()._kinds(name)
        return {MOMENTUM: (tuple(own_memory(self.params[name].detach()).shape), torch.float32)}

    def _load_state(self, name: str, stored: Mapping[str, torch.Tensor]) -> str:
        if name not in self.matrices:
            return super()._load_state(name, stored)
        key = f"{name}/{MOMENTUM}"
        if key not in stored:
            return key
        self._state(name)[MOMENTUM].copy_(stored[key])
        return ""

    @torch.no_grad()
    def _update(
        self,
        names: Sequence[str],
        grads: list[torch.Tensor],
        rates: Rates,
        scale: torch.Tensor | None = None,
        good: torch.Tensor | None = None,
        count: torch.Tensor | None = None,
        after: Sequence[str] = (),
    ) -> None:
        others = [(name, grad) for name, grad in zip(names, grads) if name not in self.matrices]
        if others:
            super()._update([n for n, _ in others], [g for _, g in others], rates, scale, good, count, after)
        for name, grad in zip(names, grads):
            if name in self.matrices:
                self._step_along_direction(name, grad, rates, scale, good)

    def _step_along_direction(
        self, name: str, grad: torch.Tensor, rates: Rates, scale: torch.Tensor | None, good: torch.Tensor | None
    ) -> None:
        value = own_memory(self.params[name].detach())
        kept = self._stored(name)
        here = {key: self.home.fetch(tensor, grad.device) for key, tensor in kept.items()}
        grad = grad.float() if scale is None else grad.float() * scale
        average = here[MOMENTUM].lerp(grad, 1 - self.settings.momentum)
        ahead = grad.lerp(average, self.settings.momentum)  # Nesterov's
        direction = self.spread.piece(
            name, self._direction(name, self.spread.whole(name, ahead.to(self.settings.dtype))), grad
        )
        master = here.get("master", value)
        moved = master * (1 - rates.lr * rates.weight_decay) - rates.lr * direction
        if good is not None:  # decided on the device: the host does not wait
            moved, average = torch.where(good > 0, moved, master), torch.where(good > 0, average, here[MOMENTUM])
        master.copy_(moved)
        here[MOMENTUM].copy_(average)
        if master is not value:
            value.copy_(master)
        for key, tensor in kept.items():
            self.home.store(here[key], tensor)

    def _direction(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """fp32, of the whole tensor's shape, scaled by each matrix's own factor."""
        if not whole.numel():  # no expert of this layer is here
            return whole.float()
        parts, width = self.matrices[name], whole.shape[1]
        stacked = whole.view(-1, sum(parts), width)
        out = [
            orthogonalised(part).float() * self.settings.factor(part.shape[1], width)
            for part in stacked.split(list(parts), dim=1)
        ]
        return torch.cat(out, dim=1).view(whole.shape)
