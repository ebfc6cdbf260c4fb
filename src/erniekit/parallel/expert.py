"""Expert parallelism: how tokens reach experts on other ranks and outputs come back, in the place of MoE.exchange.
The experts themselves run the same op wherever they are.

Called by apply.py on a model whose weights have no memory yet. T tokens, K choices of each, R rows (a token for one of
its choices), H hidden, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

from erniekit.kernels.autograd_function import Function
from erniekit.kernels.moe_permute import Order, by_expert, combine, count, gather, weights_of_rows
from erniekit.model_contract import bare, pairs_of, spread
from erniekit.parallel import comm
from erniekit.parallel.collectives import copy_to, gather_from, scatter_sum, sum_from
from erniekit.parallel.mesh import World
from erniekit.parallel.plan import Range, share
from erniekit.parallel.sharding import Sharding
from erniekit.parallel.tensor import local_like


def dispatch_of(value: str) -> str:
    """From the value of ERNIEKit's key, which also has parts that are always so here (nothing is padded)."""
    return "all_to_all" if not value or "alltoall" in value else "all_gather"


def apply_expert_parallel(model: nn.Module, sharding: Sharding, world: World, dispatch: str) -> None:
    """Each rank keeps its experts' weights; tokens and outputs travel. All ranks must call it: groups are made here."""
    layout = world.layout
    if not any(sharding.is_expert(name) for name in sharding.names()):
        return
    if layout.experts_over == "none" and layout.tp == 1:
        return
    group = world.expert_group()
    names = {module: name for name, module in model.named_modules()}
    for layer in spread(model).blocks():
        for bank in layer.mlp.banks() if layer.sparse else ():
            total = _shrink_experts(bank.experts, names[bank.experts], sharding, world)
            bank.exchange = _exchange(bank.exchange, total, world, group, dispatch)


def _exchange(here: nn.Module, total: int, world: World, group: ProcessGroup | None, dispatch: str) -> nn.Module:
    """here: the exchange of a model whose experts are all on this rank."""
    layout, tp = world.layout, world.group("tp")
    cut_tokens = "slices" if layout.sequence_parallel else "copies"
    if group is None:
        assert tp is not None
        return AllGatherExchange(here, tp, cut_tokens)
    shares = [share(total, layout.expert_ranks, place) for place in range(layout.expert_ranks)]
    mine = OwnExpertsExchange(shares[layout.expert_place(world.rank)[0]])
    if layout.experts_over == "tp" and (cut_tokens == "copies" or dispatch == "all_gather"):
        return AllGatherExchange(mine, group, cut_tokens)
    if dispatch == "all_to_all":
        spread: nn.Module = AllToAllExchange(group, shares)
    else:
        spread = AllGatherExchange(mine, group, "any")
    return AllGatherExchange(spread, tp, cut_tokens) if layout.experts_over == "data" and tp is not None else spread


def _shrink_experts(experts: nn.Module, name: str, sharding: Sharding, world: World) -> int:
    """Local weights and adapters, and the counts their modules read. Returns how many experts there are in all."""
    layout, tp, total = world.layout, world.at["tp"], 0
    place = layout.expert_place(world.rank)[0]
    for child, module in experts.named_children():
        base = bare(module)
        whole = f"{name}.{child}"
        total = sharding.expert_count(f"{whole}.weight")
        first, last = sharding.expert_share(f"{whole}.weight", place)
        base.cut_to(sharding.tp_shape(f"{whole}.weight", tp, place))
        rows = base.parts
        if sharding.cuts_inside_experts and sharding.rule(f"{whole}.weight").kind == "experts":
            rows = tuple((part, _size(share(n, layout.tp, tp))) for part, n in rows)
        for key, pair in pairs_of(module).items():
            for side in "AB":
                shape = sharding.tp_shape(f"{whole}.lora.{key}.{side}", tp, place)
                setattr(pair, side, local_like(getattr(pair, side), shape))
            pair.parts = tuple((part, dict(rows)[part]) for part, _ in pair.parts)
            pair.experts = last - first
        base.experts, base.in_features = last - first, base.held_shape[1]
        base.parts = module.parts = rows
    return total


def _size(span: Range) -> int:
    return span[1] - span[0]


class AllGatherExchange(nn.Module):
    """Every rank of the group gets the tokens of all and computes its experts' part of each; the parts are summed.

    tokens: "copies" (all have the same ones), "slices" (each its own, equally many), "any" (each its own).
    """

    def __init__(self, inner: nn.Module, group: ProcessGroup, tokens: str) -> None:
        super().__init__()
        self.inner, self.group, self.tokens = inner, group, tokens
        self.waits_for_host = tokens == "any"  # for the longest list

    def forward(self, x_TH: torch.Tensor, routing: Any, experts: nn.Module, count: int) -> torch.Tensor:
        ids, weights, group, tokens = routing.ids, routing.weights, self.group, x_TH.shape[0]
        if self.tokens == "copies":
            routing = routing._replace(weights=copy_to(weights, group))
            return sum_from(self.inner(copy_to(x_TH, group), routing, experts, count), group)
        if self.tokens == "any":
            more = (0, 0, 0, _most(tokens, x_TH.device, group) - tokens)
            x_TH, weights, ids = F.pad(x_TH, more), F.pad(weights, more), F.pad(ids, more, value=count)  # of no expert
        x_TH, weights = gather_from(x_TH, 0, group), gather_from(weights, 0, group)
        with torch.no_grad():
            ids = gather_from(ids, 0, group)
        y_TH = self.inner(x_TH, routing._replace(ids=ids, weights=weights), experts, count)
        return scatter_sum(y_TH, 0, group)[:tokens]


def _most(value: int, device: torch.device, group: ProcessGroup) -> int:
    most = torch.tensor(value, device=device)
    comm.all_reduce(most, group, "max")
    return int(most)


class OwnExpertsExchange(nn.Module):
    """Of the tokens' choices those whose experts are here."""

    waits_for_host = True

    def __init__(self, mine: Range) -> None:
        super().__init__()
        self.mine = mine

    def forward(self, x_TH: torch.Tensor, routing: Any, experts: nn.Module, count: int) -> torch.Tensor:
        first, last = self.mine
        here = (routing.ids >= first) & (routing.ids < last)
        order = by_expert(torch.where(here, routing.ids - first, last - first), last - first)
        n = int(order.ends[-1])  # waits for the device: rows of others' experts would take most of the memory
        return experts(x_TH, order._replace(row_of=order.row_of[:n]), routing.weights)  # type: ignore[no-any-return]


class AllToAllExchange(nn.Module):
    """Each row goes to the rank that has its expert together with its weight, and the weighted output comes back."""

    waits_for_host = True

    def __init__(self, group: ProcessGroup, shares: list[Range]) -> None:
        super().__init__()
        self.group, self.shares, self.rank = group, shares, comm.rank_in(group)

    def forward(self, x_TH: torch.Tensor, routing: Any, experts: nn.Module, count: int) -> torch.Tensor:
        order = by_expert(routing.ids, count)
        table = self._table(routing.ids, count)
        counts = table.tolist()  # waits for the device: how many rows travel must be known on the host
        first, last = self.shares[self.rank]
        sent = [sum(counts[self.rank][a:b]) for a, b in self.shares]
        got = [sum(row[first:last]) for row in counts]
        order, k = order._replace(row_of=order.row_of[: sum(sent)]), routing.ids.shape[1]
        rows = _Travel.apply(gather(x_TH, order, k), sent, got, self.group)
        weights = _Travel.apply(weights_of_rows(routing.weights, order), sent, got, self.group)
        come = _by_expert_from_ranks(table[:, first:last], sum(got))
        outputs = _Travel.apply(experts(rows, come, weights), got, sent, self.group)
        return combine(outputs, order, k)

    @torch.no_grad()
    def _table(self, ids: torch.Tensor, experts: int) -> torch.Tensor:
        """int64 [ranks, E]: how many rows each rank has for each expert."""
        return gather_from(count(ids, experts)[None], 0, self.group)


def _by_expert_from_ranks(table: torch.Tensor, rows: int) -> Order:
    """Rows come rank by rank, each rank's by expert; they are grouped by expert. table: [ranks, experts here]."""
    cells = table.reshape(-1)
    come = cells.cumsum(0) - cells  # where each cell's rows begin as they come, and where among all of their expert
    by_expert = table.t().reshape(-1)
    target = (by_expert.cumsum(0) - by_expert).view(table.shape[1], -1).t().reshape(-1)
    place = torch.arange(rows, device=table.device)
    place_of = place + (target - come).repeat_interleave(cells, output_size=rows)
    row_of = torch.empty_like(place_of).scatter_(0, place_of, place)
    return Order(row_of, place_of, table.sum(0).cumsum(0).to(torch.int32))


class _Travel(Function):
    """Rows to their ranks; gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], got: list[int], group: ProcessGroup) -> torch.Tensor:
        ctx.sent, ctx.got, ctx.group = sent, got, group
        return _travel(rows, sent, got, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _travel(grad, ctx.got, ctx.sent, ctx.group), None, None, None


def _travel(rows: torch.Tensor, sent: list[int], got: list[int], group: ProcessGroup) -> torch.Tensor:
    out = rows.new_empty(sum(got), rows.shape[1])
    comm.all_to_all(out, rows.contiguous(), got, sent, group)
    return out
