"""How a linear's or the experts' products are rounded while their weight is trained: slot `rounding` of a HoldsWeight.

None is not at all. recipes/fp8_training.py puts one in; train/fp8_scales.py moves the static ones' scales.
"""

from __future__ import annotations

import torch
from torch import nn

from erniekit.kernels import fp8_qat
from erniekit.kernels.stored import Stored, add_kind, kind_named
from erniekit.kernels.stored.fp8_blocks import Fp8Blocks
from erniekit.kernels.stored.fp8_static import Fp8Static, PlainObserved, StaticFormat


class BlockRounding(nn.Module):
    """Block-wise fp8: a scale for each block, of its own numbers each time."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = add_kind(Fp8Blocks())

    def stored(self, weight: torch.Tensor) -> Stored:
        return Stored(weight, kind=self.kind)

    def observe(self, x: torch.Tensor) -> None:
        """Nothing of it is kept."""

    def keep(self, seen: torch.Tensor) -> None:
        """Nothing of it is kept."""


class StaticRounding(nn.Module):
    """Fp8 with one scale for the weight (of each expert) and one for its rows, as a server will use them."""

    weight_scale: torch.Tensor  # fp32 [1], or [E] of the experts that are here
    input_scale: torch.Tensor  # fp32 [1]
    most: torch.Tensor  # fp32 [1]: the largest number that was rounded since it was last read

    def __init__(self, form: StaticFormat) -> None:
        super().__init__()
        self.form = form
        self.kind, self.measured = add_kind(Fp8Static(form)), add_kind(PlainObserved(form.block))
        self.measuring = False  # plain products, whose rows are looked at

    def give_memory(self, experts: int, device: torch.device) -> None:
        """Buffers outside of state dicts: what saves or fills a model's weights does not meet them."""
        for name, count in (("weight_scale", experts), ("input_scale", 1), ("most", 1)):
            self.register_buffer(name, torch.zeros(count, device=device), persistent=False)

    def stored(self, weight: torch.Tensor) -> Stored:
        if self.measuring:
            return Stored(weight, kind=self.measured)
        return Stored(weight, self.weight_scale, self.input_scale.expand_as(self.weight_scale), self.kind)

    def observe(self, x: torch.Tensor) -> None:
        """x [..., in] of a product that follows."""
        if self._looks():
            self.keep(kind_named(self.kind).seen(x))

    def keep(self, seen: torch.Tensor) -> None:
        """seen: what the kind observes of such rows. A second call changes nothing: a layer may be computed again."""
        if self._looks():
            self.most.copy_(torch.maximum(self.most, seen))

    def largest_of_rows(self, weight: torch.Tensor) -> torch.Tensor:
        """fp32 [rows]: of what the weight's rows are rounded from."""
        low, high = fp8_qat.rotated(weight, self.form.block).aminmax(dim=1)
        return torch.maximum(-low, high)

    @staticmethod
    def scale_of(most: torch.Tensor, highest: float) -> torch.Tensor:
        return fp8_qat.scale_of(most, highest)

    def _looks(self) -> bool:
        return self.measuring or (self.training and torch.is_grad_enabled())


def share_rounding(source: nn.Module, target: nn.Module) -> None:
    """What rounds the layers of one model rounds those of the other, which has the same weights."""
    for name, module in source.named_modules():
        if isinstance(getattr(module, "rounding", None), nn.Module):
            target.get_submodule(name).rounding = module.rounding
