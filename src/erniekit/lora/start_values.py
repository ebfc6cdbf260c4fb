"""What adapters begin as where the weight below them decides it: PiSSA's principal parts, DoRA's row lengths.

Called by recipes/weights.py with a model whose adapters have memory; its weights are read one at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from erniekit.errors import ConfigError
from erniekit.lora.inject import generator_of, lora_linears

OVERSAMPLED = 8  # further directions of the randomised decomposition, for accuracy


@torch.no_grad()
def start_from_weights(model: nn.Module, weight_of: Callable[[str], torch.Tensor], seed: int, iterations: int) -> None:
    """weight_of(name): a whole weight [rows, in]. iterations: of PiSSA's randomised decomposition; 0: an exact one."""
    for name, module in lora_linears(model):
        pairs = {key: p for key, p in module.pairs().items() if p.starts or p.magnitude is not None}
        if not pairs:
            continue
        weight = weight_of(f"{name}.weight")
        pieces = dict(zip((part for part, _ in module.parts), weight.split([n for _, n in module.parts])))
        for key, pair in pairs.items():
            rows = torch.cat([pieces[part] for part, _ in pair.parts]).float()
            if pair.magnitude is not None:
                pair.magnitude.copy_(torch.linalg.vector_norm(rows, dim=1))
            if pair.starts:
                A, B = principal(rows / pair.scale, pair.rank, iterations, f"{seed}/{name}.lora.{key}.A0")
                pair.A.copy_(A)
                pair.B.copy_(B)
                pair.A0.copy_(pair.A)  # as stored: what is rounded off is taken off as well
                pair.B0.copy_(-pair.B)


def principal(
    weight: torch.Tensor, rank: int, iterations: int = 0, name: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, in] and B [rows, rank] whose product is the weight's best approximation of that rank, the root of each
    singular value on either side."""
    if rank > min(weight.shape):
        raise ConfigError(
            f"lora_init: pissa takes {rank} directions of a weight of {weight.shape[0]} x {weight.shape[1]}",
            where="lora_rank",
            fix=f"use {min(weight.shape)} or less",
        )
    if iterations:
        left, values, right = _randomised(weight, rank, iterations, name)
    else:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
    roots = values[:rank].sqrt()
    return roots[:, None] * right[:rank], left[:, :rank] * roots


def _randomised(
    weight: torch.Tensor, rank: int, iterations: int, name: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By subspace iteration (Halko et al., 2011); drawn by the name, so that every run has the same."""
    count = min(rank + OVERSAMPLED, *weight.shape)
    basis = torch.randn(weight.shape[1], count, generator=generator_of(name))
    basis, _ = torch.linalg.qr(weight @ basis)
    for _ in range(iterations):
        basis, _ = torch.linalg.qr(weight @ torch.linalg.qr(weight.t() @ basis)[0])
    left, values, right = torch.linalg.svd(basis.t() @ weight, full_matrices=False)
    return basis @ left, values, right
