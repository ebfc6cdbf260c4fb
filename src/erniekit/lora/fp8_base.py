"""What an adapted layer's frozen layer is with `frozen_base: fp8`. Put in place by frozen.py, used by layers.py."""

from __future__ import annotations

import torch
from torch import nn

from erniekit.kernels.fp8_product import Fp8Weight, fp8_linear


class Fp8Base(nn.Module):
    """A frozen linear, or all experts of one, whose products run in fp8."""

    rows: torch.Tensor
    row_scale: torch.Tensor
    columns: torch.Tensor
    column_scale: torch.Tensor

    def __init__(self, weight: Fp8Weight, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        # Not weights by name: nothing that saves or fills a model's weights shall meet them.
        for name, tensor in weight._asdict().items():
            self.register_buffer(name, tensor, persistent=False)
        self.bias = bias

    @property
    def held(self) -> Fp8Weight:
        return Fp8Weight(self.rows, self.row_scale, self.columns, self.column_scale)

    def matrices(self) -> Fp8Weight:
        """As ExpertLinear's: [E, out, in]."""
        return self.held

    def forward(self, x: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
        y = fp8_linear(x, self.held, ends)
        return y if self.bias is None else y + self.bias
