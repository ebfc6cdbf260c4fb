"""Tensor and sequence parallelism from the plan: weights shrink to this rank's share, collectives go around them.

Called by apply.py on a model whose weights have no memory yet. Names stay as they were: collectives are hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup

from erniekit.model_contract import Tower, bare, bias_adder, pairs_of, parts_of, spread, weight_holder
from erniekit.parallel.collectives import copy_to, gather_from, scatter_sum, sum_from
from erniekit.parallel.dealt_inputs import DealtInputs
from erniekit.parallel.mesh import World
from erniekit.parallel.plan import rule_of
from erniekit.parallel.sharding import Sharding
from erniekit.parallel.vocab import VocabEmbedding, VocabHead

SEQUENCE = 1  # activations are [B, L, H]


class RepeatedKV(nn.Module):
    """An InnerPart around the inner attention of a rank whose query heads do not share kv heads evenly: one kv head a
    query head."""

    def __init__(self, inner: nn.Module, kv_of: tuple[int, ...]) -> None:
        super().__init__()
        self.inner, self.kv_of = inner, list(kv_of)

    def takes(self, dtype: torch.dtype, ctx: Any) -> bool:
        return False

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: Any) -> torch.Tensor:
        if not self.kv_of:
            return q  # no head of this layer is here; the sum over ranks does not miss it
        result: torch.Tensor = self.inner(q, k[:, :, self.kv_of], v[:, :, self.kv_of], ctx)
        return result


def apply_tensor_parallel(model: nn.Module, sharding: Sharding, world: World) -> None:
    group = world.group("tp")
    if group is None:
        return
    tp, sp = world.at["tp"], world.layout.sequence_parallel
    for name, module in list(model.named_modules()):
        base = bare(module)
        if name.endswith(".base") or not isinstance(base, (nn.Linear, nn.Embedding)):
            continue
        rule = rule_of(sharding.plan, name)
        if rule.is_whole:
            continue
        _shrink(module, base, name, sharding, tp)
        if rule.kind == "vocab":
            if isinstance(base, nn.Embedding):
                spread(model).embedding = VocabEmbedding(sharding, name, tp, group, sp)
        elif rule.splits_output:
            module.register_forward_pre_hook(_entering(group, sp))
        else:
            assert isinstance(base, nn.Linear)
            _leave_summed(module, base, group, sp)
    for tower in spread(model).towers().values():
        if _is_dealt(tower, sharding, sp):
            tower.encode = DealtInputs(group, tp, sliced=sp)
    if sp:
        _work_on_slices(model, tp, world.layout.tp)
    _share_heads(model, sharding, tp)
    sizes = [
        sharding.tp_shape("embed.weight" if sharding.tied else "head.weight", t)[0] for t in range(world.layout.tp)
    ]
    spread(model).output = VocabHead(group, sizes, tp, sp)


def local_like(param: nn.Parameter, shape: tuple[int, ...]) -> nn.Parameter:
    data = torch.empty(shape, dtype=param.dtype, device=param.device)
    return nn.Parameter(data, requires_grad=param.requires_grad)


def _shrink(module: nn.Module, base: nn.Module, name: str, sharding: Sharding, tp: int) -> None:
    """Local weights, biases and adapters, and the row counts others read from the module."""
    holder, linear, adapted = weight_holder(base), cast("Any", base), cast("Any", module)
    for leaf, param in list(base.named_parameters(recurse=False)):
        if leaf != "weight" or holder is None:
            setattr(base, leaf, local_like(param, sharding.tp_shape(f"{name}.{leaf}", tp)))
    if holder is not None:
        holder.cut_to(sharding.tp_shape(f"{name}.weight", tp))
        linear.out_features, linear.in_features = holder.held_shape
    elif isinstance(base, nn.Linear):
        base.out_features, base.in_features = base.weight.shape
    if (parts := parts_of(base)) is not None:
        linear.parts = adapted.parts = _local_parts(parts, sharding, name, tp)
    elif (parts := parts_of(module)) is not None:
        adapted.parts = ((parts[0][0], linear.out_features),)
    for key, pair in pairs_of(module).items():
        for side, param in list(pair.named_parameters()):
            setattr(pair, side, local_like(param, sharding.tp_shape(f"{name}.lora.{key}.{side}", tp)))
        rows = dict(adapted.parts)
        pair.parts = tuple((part, rows[part]) for part, _ in pair.parts)


def _local_parts(
    parts: tuple[tuple[str, int], ...], sharding: Sharding, name: str, tp: int
) -> tuple[tuple[str, int], ...]:
    cut = sharding.cut(f"{name}.weight", tp)
    assert cut is not None
    out, start = [], 0
    for part, rows in parts:
        held = sum(min(b, start + rows) - max(a, start) for a, b in cut.rows if a < start + rows and b > start)
        out.append((part, held))
        start += rows
    return tuple(out)


def _entering(group: ProcessGroup, sp: bool) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = gather_from(args[0], SEQUENCE, group) if sp else copy_to(args[0], group)
        return (x, *args[1:])

    return hook


def _leave_summed(module: nn.Module, base: nn.Linear, group: ProcessGroup, sp: bool) -> None:
    """The partial products are summed; the bias is added once, to the sum."""
    linear = bias_adder(base)
    linear.adds_bias = False

    def hook(_: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        out = scatter_sum(out, SEQUENCE, group) if sp else sum_from(out, group)
        return out if base.bias is None else out + base.bias

    module.register_forward_hook(hook)


def _work_on_slices(model: nn.Module, tp: int, ranks: int) -> None:
    """Modules that find their tokens by the places in a row get which slice of it is here."""
    for layer in spread(model).blocks():
        if layer.sparse:
            layer.mlp.piece = (tp, ranks)
    for tower in spread(model).towers().values():
        tower.insert = SlicedInsertion(tp, ranks)
    spread(model).row_slice = (tp, ranks)


def _is_dealt(tower: Tower, sharding: Sharding, sp: bool) -> bool:
    """Whether its items are dealt out to the ranks; else each encodes all of them, with the weights it has."""
    kinds = {sharding.rule(name).kind for name in sharding.names() if name.startswith(tower.prefixes)}
    assert kinds == {"dealt"} or "dealt" not in kinds, f"tower {tower.name}: weights of dealt items are all dealt()"
    # Sums over ranks inside a tower would be sums of other slices' gradients.
    whole = kinds <= {"dealt", "replicate"}
    assert whole or not sp, f"tower {tower.name}: under sequence parallelism its weights are dealt() or replicate()"
    return kinds == {"dealt"}


class SlicedInsertion(nn.Module):
    """In the slot of models.layers.tower.LocalInsertion: this rank has a slice of every row. A place behind
    all tokens is none."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks

    def forward(self, x_BSH: torch.Tensor, features_VH: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        B, size, H = x_BSH.shape
        row, column = places // (size * self.ranks), places % (size * self.ranks)
        here = column // size == self.rank
        spare = B * size  # features of other slices go to a row behind all others
        index = torch.where(here, row * size + column - self.rank * size, spare)
        flat = torch.cat((x_BSH.flatten(0, 1), x_BSH.new_zeros(1, H)))
        return flat.index_copy(0, index, features_VH.to(x_BSH.dtype))[:-1].view_as(x_BSH)


def _share_heads(model: nn.Module, sharding: Sharding, tp: int) -> None:
    mine = sharding.head_share(tp)
    if mine.uniform:
        return
    for layer in spread(model).blocks():
        layer.attn.inner = RepeatedKV(layer.attn.inner, mine.kv_of)
