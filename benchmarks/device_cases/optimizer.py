"""Tensors of an AdamW update on a card."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from erniekit.kernels.adamw_slot import Rates, Slot

RATES = Rates(1e-3, (0.9, 0.95), 1e-8, 0.1)


def slots(
    shapes: Sequence[Sequence[int]],
    grad: torch.dtype,
    weight: torch.dtype | None,
    seed: int = 0,
    moment: torch.dtype = torch.float32,
) -> list[Slot]:
    random = torch.Generator("cuda").manual_seed(seed)

    def made(shape: Sequence[int], scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=random).mul_(scale)

    out = []
    for shape in shapes:
        master = made(shape, 0.02)
        out.append(
            Slot(
                made(shape, 1e-3).to(grad), master,
                made(shape, 1e-4).to(moment), made(shape, 1e-4).square_().to(moment),
                torch.full((), 3.0, device="cuda"), None if weight is None else master.to(weight),
            )
        )  # fmt: skip
    return out
