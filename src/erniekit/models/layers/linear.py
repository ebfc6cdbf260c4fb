"""Linears that hold a stored weight: plain, or fused from several projections end to end, each under its public name.

Used by every block; LoRA, the weight-name tables and parallel/ read `parts`, `weight` and `stored`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from erniekit.errors import ConfigError
from erniekit.kernels.linear import linear
from erniekit.kernels.stored import PLAIN, Agree, Stored, kind_named
from erniekit.kernels.stored.base import SLOTS
from erniekit.model_contract import packed_layers


class HoldsWeight(nn.Module):
    """A weight [rows, in] as its kind keeps it. It starts plain, as the parameter `weight`; `store_as` makes it another
    kind while it has no memory yet, and `pack` fills that from the plain numbers, which are then freed."""

    weight: nn.Parameter | None
    rounding: Any  # how products with a plain weight are rounded in training (rounding.py); None: not at all
    kind = PLAIN
    packed_shape: tuple[int, ...] | None = None  # [rows, in] of what is packed; None: the weight is plain

    def stored(self) -> Stored:
        if self.weight is not None:
            return Stored(self.weight) if self.rounding is None else self.rounding.stored(self.weight)
        data, scale, extra = (getattr(self, f"packed_{slot}") for slot in SLOTS)
        if not torch.compiler.is_compiling() and data.numel() and not data.untyped_storage().nbytes():
            raise RuntimeError("packed weights that ranks share are here only while their layer computes")
        return Stored(data, scale, extra, self.kind)

    @property
    def multiplied_as(self) -> str:
        """The kind that its products are of."""
        return self.kind if self.rounding is None else str(self.rounding.kind)

    def observe(self, x: torch.Tensor) -> None:
        """Called with what is multiplied by the weight, before it is."""
        if self.rounding is not None:
            self.rounding.observe(x)

    def store_as(self, kind: str) -> None:
        assert self.weight is not None
        self.kind, self.packed_shape = kind, self.held_shape
        del self.weight
        self.register_parameter("weight", None)

    def cut_to(self, shape: tuple[int, ...]) -> None:
        """A rank's share of the weight, before it has memory."""
        if self.weight is None:
            self.packed_shape = shape
        else:
            data = torch.empty(shape, dtype=self.weight.dtype, device=self.weight.device)
            self.weight = nn.Parameter(data, requires_grad=self.weight.requires_grad)

    @property
    def held_shape(self) -> tuple[int, int]:
        shape = self.packed_shape if self.weight is None else self.weight.shape
        assert shape is not None
        rows, width = shape
        return rows, width

    @property
    def is_packed(self) -> bool:
        return hasattr(self, "packed_data")

    @torch.no_grad()
    def pack(self, plain: torch.Tensor, agree: Agree | None = None) -> None:
        """plain [rows, in]. The packed tensors are buffers outside of state dicts: what saves or fills a model's
        weights does not meet them."""
        kind = kind_named(self.kind)
        packed = kind.pack(plain, agree)
        if kind.shape(packed) != plain.shape:  # of a kind that another package brings
            raise ConfigError(
                f"kind of weights {kind.name!r} packs a weight of {tuple(plain.shape)} as one of {kind.shape(packed)}",
                where=f"{type(kind).__module__}.{type(kind).__name__}",
                fix="let its shape() say (out, in) of what its pack() returns (docs/kernels.md)",
            )
        self.kind = packed.kind  # a kind may find that these numbers need a related one
        for slot in SLOTS:
            self.register_buffer(f"packed_{slot}", getattr(packed, slot), persistent=False)


def share_packed(source: nn.Module, target: nn.Module) -> None:
    """The packed weights of one model in another of the same shape, which is plain and has no memory yet."""
    for name, holder in packed_layers(source).items():
        other = cast("HoldsWeight", target.get_submodule(name))
        other.store_as(holder.kind)
        for slot in SLOTS:
            other.register_buffer(f"packed_{slot}", getattr(holder, f"packed_{slot}"), persistent=False)


class Linear(nn.Linear, HoldsWeight):  # type: ignore[misc]  # torch's has always a weight
    adds_bias = True  # False: the bias is added elsewhere, once the outputs of several ranks have been summed

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.rounding = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.observe(x)
        return linear(x, self.stored(), self.added_bias)

    @property
    def added_bias(self) -> torch.Tensor | None:
        return self.bias if self.adds_bias else None


class FusedLinear(Linear):
    """parts: (public name, rows) in row order, e.g. (("q_proj", 2048), ("k_proj", 256), ("v_proj", 256))."""

    def __init__(self, in_features: int, parts: tuple[tuple[str, int], ...], bias: bool) -> None:
        super().__init__(in_features, sum(rows for _, rows in parts), bias=bias)
        self.parts = parts


if TYPE_CHECKING:  # the contract, checked where it is kept
    from erniekit.model_contract import BiasAdder, WeightHolder

    def _holder(layer: HoldsWeight) -> WeightHolder:
        return layer

    def _adder(linear: Linear) -> BiasAdder:
        return linear


def is_watched(module: nn.Module) -> bool:
    """Hooks are registered on it, so that it must be called."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
