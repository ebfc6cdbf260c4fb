"""Several adapters of one base in one batch: every linear multiplies all rows by the base's weight and by the factors
of all adapters side by side, and each row keeps the columns of its own.

Used by recorded.py. Side by side the factors are still narrow (8 adapters of rank 16 are 128 columns), so that one
product costs little more than that of one adapter, needs no sorting, and has a fixed shape. Experts' and routers'
adapters have no such form: a base with those runs once for each model. T tokens, R ranks of all adapters together.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from erniekit.kernels.lora_linear import RowUpdate, placed
from erniekit.kernels.stored import kind_of
from erniekit.lora.layers import LoRALayer, LoRALinear


class AdapterRows:
    """Which model each token of the step is for; shared by all layers."""

    def __init__(self) -> None:
        self.of: torch.Tensor | None = None  # int64 [T]: a place in the list of models


class BatchedLoRALinear(nn.Module):
    """base: a linear. adapters: of each model, in the order of their list; None: it has none here."""

    def __init__(self, base: nn.Module, adapters: list[LoRALinear | None], rows: AdapterRows) -> None:
        super().__init__()
        self.base, self.rows = base, rows
        self.parts = getattr(base, "parts", None)
        updates: list[RowUpdate] = []
        owners: list[int] = []
        for number, adapter in enumerate(adapters):
            adapter_updates = [] if adapter is None else adapter.row_updates()
            updates += adapter_updates
            owners += [number] * len(adapter_updates)
        out, _ = base.held_shape  # type: ignore[operator,misc]
        self.A = torch.cat([update.A for update in updates])
        self.B = placed(updates, out).t().contiguous()
        # [models, R]: a model's scale on the columns of its own updates.
        self.factors = self.A.new_zeros(len(adapters), self.A.shape[0])
        at = 0
        for update, number in zip(updates, owners):
            rank = update.A.shape[0]
            self.factors[number, at : at + rank] = update.scale
            at += rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.rows.of is not None
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        low = F.linear(rows, self.A) * self.factors.index_select(0, self.rows.of)
        weight, bias = self.base.stored(), self.base.added_bias  # type: ignore[operator]
        y = kind_of(weight).product_plus(rows, weight, low, self.B, 1.0)
        y = y if bias is None else y + bias  # type: ignore[operator]
        return y.view(*x.shape[:-1], y.shape[-1])


def joined(models: Mapping[str, nn.Module], rows: AdapterRows) -> nn.Module | None:
    """One tree for all of them, on the same tensors; None: they cannot be in one batch."""
    if len(models) < 2:
        return None
    trees = [{n: m for n, m in model.named_modules() if isinstance(m, LoRALayer)} for model in models.values()]
    layers = [layer for tree in trees for layer in tree.values()]
    base = next((model for model, tree in zip(models.values(), trees) if not tree), None)
    if base is None or not all(type(layer) is LoRALinear and layer.active for layer in layers):
        return None
    kept = {id(t): t for t in (*base.parameters(), *base.buffers())}
    made: nn.Module = copy.deepcopy(base, kept)
    for name in sorted({name for tree in trees for name in tree}):
        owner, _, leaf = name.rpartition(".")
        adapters = [tree.get(name) for tree in trees]
        place = made.get_submodule(owner)
        setattr(place, leaf, BatchedLoRALinear(getattr(place, leaf), adapters, rows))  # type: ignore[arg-type]
    return made
