"""A linear layer whose rows are several projections end to end: one GEMM, and every part keeps its public name.

Used by attention (q, k, v) and mlp (gate, up); LoRA and the weight-name tables read `parts`.
"""

from __future__ import annotations

from torch import nn


class FusedLinear(nn.Linear):
    """parts: (public name, rows) in row order, e.g. (("q_proj", 2048), ("k_proj", 256), ("v_proj", 256))."""

    def __init__(self, in_features: int, parts: tuple[tuple[str, int], ...], bias: bool) -> None:
        super().__init__(in_features, sum(rows for _, rows in parts), bias=bias)
        self.parts = parts


def parts_of(module: nn.Linear, name: str) -> tuple[tuple[str, int], ...]:
    """The public projections inside a linear: its parts, or itself under `name`."""
    return module.parts if isinstance(module, FusedLinear) else ((name, module.out_features),)


def is_watched(module: nn.Module) -> bool:
    """Somebody looks on as it is called, so that it must be."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
