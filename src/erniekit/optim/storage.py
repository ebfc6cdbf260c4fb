"""How weights and moments are stored between updates: the choice, and the tensors it takes. Used by adamw.py.

kernels/adamw.py describes these tensors; docs/optimiser-memory.md what each choice costs and loses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from erniekit.kernels.moments8 import BLOCK, fits8
from erniekit.kernels.position_noise import TensorPart, salt_of

MOMENTS = ("exp_avg", "exp_avg_sq")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale", "exp_avg_sq_span")  # in the order of moments8.Scales
WIDE = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Storage:
    """moments: fp32, bf16 or 8bit. masters, of 16-bit weights: fp32 (a copy), exact16 (the 16 bits that the weight
    lacks) or none (only the weight, rounded by chance). stochastic: bf16 moments are rounded by chance, else to the
    nearest. seed: of what is drawn by position. places: where a rank's parts lie in whole tensors; one not
    listed is whole."""

    moments: str = "fp32"
    masters: str = "fp32"
    stochastic: bool = True
    seed: int = 0
    places: Mapping[str, TensorPart] = field(default_factory=dict)

    def place(self, name: str, value: torch.Tensor) -> TensorPart:
        given = self.places.get(name)
        return (
            TensorPart(salt_of(self.seed, name), block=BLOCK if fits8(tuple(value.shape)) else 0)
            if given is None
            else given
        )

    def master_of(self, value: torch.Tensor) -> str:
        """own (the weight is fp32 itself), fp32, exact16 or none. Norms and biases always have one: they are few, and
        most of their updates are far below a step of bf16."""
        if value.dtype == torch.float32:
            return "own"
        return "exact16" if self.masters == "none" and value.dim() != 2 else self.masters

    def blocks(self, place: TensorPart) -> bool:
        """Whether a tensor's moments are in 8 bit."""
        return self.moments == "8bit" and place.block > 0

    def state_kinds(self, shape: tuple[int, ...], place: TensorPart) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> shape and dtype of what an update keeps of a parameter besides its master."""
        if not self.blocks(place):
            dtype = WIDE.get(self.moments, torch.float32)
            return {name: (shape, dtype) for name in MOMENTS}
        scales = (shape[0], -(-shape[1] // place.block))
        return {name: (shape, torch.uint8) for name in MOMENTS} | {name: (scales, torch.float32) for name in SCALES}


def stored_name(param: str, state: str, block: int) -> str:
    """In a checkpoint. The name of scales has how many columns each is of: `layers.0.w/exp_avg_scale#256`."""
    return f"{param}/{state}#{block}" if state in SCALES else f"{param}/{state}"
