"""Several adapters of one base in one batch: every layer multiplies all rows by the base's weight once and adds to each
row the update of its own adapter.

Used by recorded.py. Of a linear the factors of all adapters lie side by side, and each row keeps the columns of its
own: they are still narrow (8 adapters of rank 16 are 128 columns), so that one product costs little more than that of
one adapter, needs no sorting, and has a fixed shape. Rows of experts are sorted anyway: there each expert's rows are
sorted by adapter as well, and the grouped products of low ranks have a group for each expert and adapter. The
definition is one tree for each model (lora/layers.py), which plain_step.py runs one by one.
T tokens, R ranks of all adapters together, E experts, M models, r the highest rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from erniekit.kernels.expert_mlp import Update, expert_mlp_of_groups
from erniekit.kernels.lora_linear import RowUpdate, placed
from erniekit.kernels.moe_permute import MOST_CELLS, by_expert_and_group
from erniekit.kernels.precision import at_least_fp32
from erniekit.kernels.router_logits import router_logits
from erniekit.kernels.stored import kind_of
from erniekit.lora.layers import LoRAExperts, LoRALayer, LoRALinear, LoRARouter
from erniekit.models.layers.moe import LocalExchange, MoE
from erniekit.models.layers.router import Routing
from erniekit.serve.shared_weights import same_tensors


class AdapterRows:
    """Which model each token of the step is for; shared by all layers."""

    def __init__(self) -> None:
        self.of: torch.Tensor | None = None  # int64 [T]: a place in the list of models


class BatchedLoRALinear(nn.Module):
    """base: a linear. adapters: of each model, in the order of their list; None: it has none here."""

    def __init__(self, base: nn.Module, adapters: Sequence[LoRALinear | None], rows: AdapterRows) -> None:
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
        self.factors = _scales(self.A, [update.A.shape[0] for update in updates], updates, owners, len(adapters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.rows.of is not None
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        low = F.linear(rows, self.A) * self.factors.index_select(0, self.rows.of)
        weight, bias = self.base.stored(), self.base.added_bias  # type: ignore[operator]
        y = kind_of(weight).product_plus(rows, weight, low, self.B, 1.0)
        y = y if bias is None else y + bias  # type: ignore[operator]
        return y.view(*x.shape[:-1], y.shape[-1])


class BatchedLoRARouter(nn.Module):
    """base: a router, whose logits are fp32; so are the updates."""

    def __init__(self, base: nn.Module, adapters: Sequence[LoRARouter | None], rows: AdapterRows) -> None:
        super().__init__()
        self.base: Any = base
        self.rows = rows
        pairs = [(n, pair) for n, a in enumerate(adapters) if a is not None for pair in a.pairs().values()]
        self.A = torch.cat([at_least_fp32(pair.A) for _, pair in pairs])
        self.B = torch.cat([at_least_fp32(pair.B) for _, pair in pairs], dim=1)
        ranks, owners = [pair.A.shape[0] for _, pair in pairs], [number for number, _ in pairs]
        self.factors = _scales(self.A, ranks, [pair for _, pair in pairs], owners, len(adapters))

    @property
    def experts(self) -> int:
        return int(self.base.experts)

    def forward(self, x_TH: torch.Tensor, bias: torch.Tensor | None = None) -> Routing:
        assert self.rows.of is not None
        low = F.linear(at_least_fp32(x_TH), self.A) * self.factors.index_select(0, self.rows.of)
        logits = router_logits(x_TH, self.base.weight) + F.linear(low, self.B)
        chosen: Routing = self.base.choose(x_TH, logits, bias)
        return chosen


class AdapterExchange(nn.Module):
    """In the place of a LocalExchange: the rows of each expert in groups, one for each model."""

    def __init__(self, updates: Mapping[str, Update], models: int, rows: AdapterRows) -> None:
        """updates: by projection, of all experts and models (`stacked_updates`)."""
        super().__init__()
        self.updates, self.models, self.rows = dict(updates), models, rows

    def forward(self, x_TH: torch.Tensor, routing: Routing, experts: Any, count: int) -> torch.Tensor:
        assert self.rows.of is not None
        order, ends = by_expert_and_group(routing.ids, self.rows.of, count, self.models)
        three = [self.updates.get(part) for part, _ in (*experts.gate_up.parts, *experts.down.parts)]
        weights = experts.gate_up.matrices(), experts.down.matrices()
        return expert_mlp_of_groups(x_TH, order, ends, routing.weights, *weights, *three)


def stacked_updates(adapters: Sequence[Mapping[str, Update]]) -> dict[str, Update]:
    """Of each model the updates of its experts by projection -> A [E * M, r, in] and B [E * M, out, r], expert after
    expert; zero where a model has none, or a lower rank."""
    out = {}
    for part in sorted({part for of_model in adapters for part in of_model}):
        given = [of_model.get(part) for of_model in adapters]
        one = next(update for update in given if update is not None)
        rank = max(update.A.shape[1] for update in given if update is not None)
        E, _, width = one.A.shape
        A = one.A.new_zeros(E, len(given), rank, width)
        B = one.B.new_zeros(E, len(given), one.B.shape[1], rank)
        for number, update in enumerate(given):
            if update is not None:
                own = update.A.shape[1]
                A[:, number, :own], B[:, number, :, :own] = update.A, update.B * update.scale
        out[part] = Update(A.flatten(0, 1), B.flatten(0, 1), 1.0)
    return out


def _scales(like: torch.Tensor, ranks: Sequence[int], scaled: Sequence[Any], owners: Sequence[int], models: int) -> Any:
    """[M, R]: a model's scale on the columns of its own updates, zero elsewhere."""
    factors = like.new_zeros(models, sum(ranks))
    at = 0
    for rank, update, owner in zip(ranks, scaled, owners, strict=True):
        factors[owner, at : at + rank] = update.scale
        at += rank
    return factors


BATCHED: dict[type[LoRALayer], Any] = {LoRALinear: BatchedLoRALinear, LoRARouter: BatchedLoRARouter}
Trees = Sequence[Mapping[str, LoRALayer]]


def without_adapters(models: Mapping[str, nn.Module]) -> list[str]:
    """Names of those that are the base itself."""
    return [name for name, model in models.items() if not _adapted(model)]


def _adapted(model: nn.Module) -> dict[str, LoRALayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALayer)}


def batchable(models: Mapping[str, nn.Module]) -> list[str]:
    """Names of those that can be in one batch: the base, and adapters whose layers all can. None: there is no base, or
    nothing to batch it with."""
    base = next(iter(without_adapters(models)), None)
    if base is None:
        return []
    names = [
        name
        for name, model in models.items()
        if all(_joinable(models[base], place, layer, len(models)) for place, layer in _adapted(model).items())
    ]
    return names if len(names) > 1 else []


def joined(models: Mapping[str, nn.Module], rows: AdapterRows) -> nn.Module:
    """One tree for all of these, which are `batchable`, on the same tensors."""
    trees: Trees = [_adapted(model) for model in models.values()]
    made = same_tensors(models[without_adapters(models)[0]])
    of_experts: dict[str, None] = {}
    for name in sorted({name for tree in trees for name in tree}):
        adapters = [tree.get(name) for tree in trees]
        kind = type(next(adapter for adapter in adapters if adapter is not None))
        owner, _, leaf = name.rpartition(".")
        if kind is LoRAExperts:
            of_experts[owner.rpartition(".")[0]] = None
            continue
        place = made.get_submodule(owner)
        setattr(place, leaf, BATCHED[kind](getattr(place, leaf), adapters, rows))
    for name in of_experts:
        block = made.get_submodule(name)
        block.exchange = AdapterExchange(stacked_updates(_of_block(name, trees)), len(trees), rows)
    return made


def _joinable(base: nn.Module, name: str, layer: LoRALayer, models: int) -> bool:
    """Experts: of a model whose tokens all go to one bank, computed as they are (no rounding of their inputs)."""
    if not layer.active:
        return False
    if type(layer) is LoRAExperts:
        block: Any = base.get_submodule(name.rpartition(".experts.")[0])
        if layer.base.experts * models > MOST_CELLS:
            return False
        return type(block) is MoE and type(block.exchange) is LocalExchange and layer.base.rounding is None
    if type(layer) is LoRARouter:
        return type(base.get_submodule(name.rpartition(".")[0])) is MoE
    return type(layer) is LoRALinear


def _of_block(name: str, trees: Trees) -> list[dict[str, Update]]:
    """Of each model the updates of the experts of the block of that name."""
    out: list[dict[str, Update]] = []
    for tree in trees:
        layers = [tree.get(f"{name}.experts.{leaf}") for leaf in ("gate_up", "down")]
        out.append({p: u for layer in layers if isinstance(layer, LoRAExperts) for p, u in layer.updates().items()})
    return out
