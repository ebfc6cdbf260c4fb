"""What an AdamW update is given: the tensors of each parameter, and the rates for all of them. Made by optim/adamw.py.

adamw.py and lean_adamw.py compute the update.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from erniekit.kernels import moments8
from erniekit.kernels.position_noise import TensorPart


class Slot(NamedTuple):
    """One parameter: its gradient and what an update changes."""

    grad: torch.Tensor  # 16-bit or fp32
    master: torch.Tensor | None  # fp32; None: the weight itself is all there is, or the weight and its remainder
    average: torch.Tensor  # fp32, bf16 or 8-bit codes, as the next
    square: torch.Tensor
    step: torch.Tensor  # fp32 [], updates so far
    weight: torch.Tensor | None = None  # 16-bit, becomes the master's rounded value; None: the master is the weight
    remainder: torch.Tensor | None = None  # int16: exact_master.py
    scales: moments8.Scales | None = None  # of 8-bit moments
    place: TensorPart | None = None  # of whatever is drawn by position: 8-bit moments, weights without a master

    @property
    def lean(self) -> bool:
        """Stored in fewer bytes than an fp32 master and wide moments."""
        return self.master is None or self.scales is not None


class Rates(NamedTuple):
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    stochastic: bool = True  # how bf16 moments are rounded; else to the nearest
