"""Adapter: low-rank updates by public projection name, the form between files of any kind and a model's parameters.

Read and written by adapter_files.py and paddle_files.py; put into models here; folded into weights by merge.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from erniekit.errors import CheckpointError
from erniekit.lora.inject import PairShape, lora_linears, lora_state, wrap
from erniekit.lora.layers import Pair
from erniekit.lora.projections import Projection, config_of, projections, short_name_of, short_names
from erniekit.lora.settings import LoRASettings
from erniekit.lora_scale import alpha_of
from erniekit.models.score_head import WEIGHT as SCORE
from erniekit.printable import counted


@dataclass(frozen=True)
class LowRank:
    """An update scale * B @ A of one projection's weight [rows, in]."""

    A: torch.Tensor  # [r, in]
    B: torch.Tensor  # [rows, r]
    scale: float
    magnitude: torch.Tensor | None = None  # [rows]: DoRA, the length that each row of the sum is brought to

    @property
    def rank(self) -> int:
        return self.A.shape[0]


@dataclass(frozen=True)
class Adapter:
    updates: dict[str, LowRank]  # by public name: model.layers.0.self_attn.q_proj
    rank: int  # of its config; single updates may differ (PEFT's rank_pattern)
    alpha: float
    rslora: bool = False
    lora_plus_scale: float = 1.0
    base: str | None = None  # the model it was trained on, as its config names it
    where: str = "the adapter"  # folder, for messages
    head: torch.Tensor | None = None  # [classes, hidden]: a score head, trained whole beside the updates

    @property
    def scale(self) -> float:
        return LoRASettings(self.rank, self.alpha, self.rslora).scaling

    def settings(self, model: nn.Module, shared_a: bool = False) -> LoRASettings:
        """The settings `inject` needs to go on training this adapter."""
        targets = tuple(short_names(list(self.updates), model))
        return LoRASettings(self.rank, self.alpha, self.rslora, self.lora_plus_scale, targets, shared_a, self.dora)

    @property
    def dora(self) -> bool:
        return any(update.magnitude is not None for update in self.updates.values())


def combined(adapters: Sequence[Adapter]) -> Adapter:
    """One adapter that adds what all of them add: ranks stacked, [A_1; A_2] and [s_1 B_1, s_2 B_2] in fp32."""
    if len(adapters) == 1:
        return adapters[0]
    refuse_dora_among(adapters)
    updates = {}
    for name in dict.fromkeys(name for adapter in adapters for name in adapter.updates):
        found = [adapter.updates[name] for adapter in adapters if name in adapter.updates]
        A = torch.cat([u.A.float() for u in found])
        updates[name] = LowRank(A, torch.cat([u.B.float() * u.scale for u in found], dim=1), 1.0)
    rank = max(update.rank for update in updates.values())
    where = " and ".join(adapter.where for adapter in adapters)
    return Adapter(updates, rank, float(rank), base=adapters[0].base, where=where)


def refuse_dora_among(adapters: Sequence[Adapter]) -> None:
    """What several adapters add can be summed; lengths that each row is brought to cannot."""
    if len(adapters) > 1 and (found := next((a for a in adapters if a.dora), None)) is not None:
        raise CheckpointError(
            "a DoRA adapter sets the length of each row and cannot be merged together with others",
            where=found.where,
            fix="merge it alone first, and the others into the result",
        )


def adapter_of(
    model: nn.Module,
    settings: LoRASettings,
    tensors: Mapping[str, torch.Tensor] | None = None,
    base: str | None = None,
) -> Adapter:
    """The adapters inside a model; `tensors` (our names) stand in for its parameters, e.g. a snapshot being saved."""
    values = lora_state(model) if tensors is None else tensors
    by_place = {p.place: p.public for p in projections(model)}
    updates = {}
    for name, module in lora_linears(model):
        for key, pair in module.pairs().items():
            of = {side: values[f"{name}.lora.{key}.{side}"].detach() for side, _ in pair.named_parameters()}
            A, B = of["A"], of["B"]
            if pair.starts:  # as PEFT converts PiSSA: twice the rank, on the model's own weights
                A, B = torch.cat((A, of["A0"])), torch.cat((B, of["B0"]), dim=1)
            for expert, part, a, b, magnitude in pair.updates(A, B, of.get("magnitude")):
                updates[by_place[name, part, expert]] = LowRank(a, b, pair.scale, magnitude)
    rank, alpha = settings.rank, settings.alpha
    if settings.pissa:
        rank, alpha = 2 * rank, alpha_of(settings.scaling, 2 * rank, settings.rslora)
    head = values[SCORE].detach() if SCORE in values else None
    return Adapter(updates, rank, alpha, settings.rslora, settings.lora_plus_scale, base, "this model", head)


def attach(model: nn.Module, adapter: Adapter, shared_a: bool = False) -> list[Projection]:
    """Wrap exactly the projections the adapter has and fill them: for chat, export and the API. Nothing is trained.

    A meta model is wrapped only: fill it with `load_adapter` once it has memory.
    """
    present = places(model, adapter)
    _check_experts(model, present, adapter)
    wrap(model, {p: PairShape(u.rank, u.scale, u.magnitude is not None) for p, u in present.items()}, shared_a)
    if not next(model.parameters()).is_meta:
        load_adapter(model, adapter)
    for _, module in lora_linears(model):
        module.requires_grad_(False)
    return list(present)


@torch.no_grad()
def load_adapter(model: nn.Module, adapter: Adapter, under: str = "") -> None:
    """Fill a model's adapters; every one of them must be in `adapter`, and nothing may be left over.

    under: only modules whose name starts so (one layer of a model that is filled piece by piece).
    """
    present = {p.place: u for p, u in places(model, adapter).items() if p.module.startswith(under)}
    if adapter.head is not None and not under:
        model.get_parameter(SCORE).copy_(adapter.head)
    for name, module in lora_linears(model):
        if not name.startswith(under):
            continue
        for pair in module.pairs().values():
            keys = [(name, part, e) for e in range(pair.experts) for part, _ in pair.parts]
            _fill(pair, [present.pop(place, None) for place in keys], name, adapter)
    if present:
        extra = sorted({part for _, part, _ in present})
        raise CheckpointError(
            f"the adapter also has {counted(len(present), 'projection')} this run does not adapt: {', '.join(extra)}",
            where=adapter.where,
            fix=f"set lora_target_modules to what it was trained with: {' '.join(_parts(adapter))}",
        )


def _fill(pair: Pair, found: list[LowRank | None], module: str, adapter: Adapter) -> None:
    """`found`: expert after expert, in each the parts in their order."""
    updates, each = [u for u in found if u is not None], len(pair.parts)
    if len(updates) < len(found):
        raise CheckpointError(
            f"the adapter has nothing for {pair.parts[found.index(None) % each][0]} in {module}",
            where=adapter.where,
            fix=f"set lora_target_modules to what it was trained with: {' '.join(_parts(adapter))}",
        )
    first = updates[0]
    if any((u.magnitude is None) != (pair.magnitude is None) for u in updates):
        has = first.magnitude is not None
        raise CheckpointError(
            f"the adapter is {'DoRA' if has else 'plain LoRA'}, and this run trains {'plain LoRA' if has else 'DoRA'}",
            where=adapter.where,
            fix=f"set use_dora: {has}",
        )
    if any(u.rank != pair.whole_rank or abs(u.scale - pair.scale) > 1e-6 * pair.scale for u in updates):
        raise CheckpointError(
            f"the adapter has rank {first.rank} and scale {first.scale:g}; "
            f"this run asks for rank {pair.whole_rank} and scale {pair.scale:g}",
            where=adapter.where,
            fix=f"set lora_rank: {adapter.rank}, lora_alpha: {adapter.alpha:g}, rslora: {adapter.rslora}",
        )
    if any(not torch.equal(u.A, updates[k - k % each].A) for k, u in enumerate(updates)):
        raise CheckpointError(
            f"the adapter has an A for each projection of {module}; compat: erniekit trains one A for all of them",
            where=adapter.where,
            fix="leave out compat: erniekit to continue training it",
        )
    A, B = torch.cat([u.A for u in updates[::each]]), torch.cat([u.B for u in updates])
    if pair.starts:
        (A, first_A), (B, first_B) = A.split(pair.rank), B.split(pair.rank, dim=1)
        pair.A0.copy_(first_A)
        pair.B0.copy_(first_B)
    pair.A.copy_(A)
    pair.B.copy_(B)
    if pair.magnitude is not None:
        pair.magnitude.copy_(torch.cat([u.magnitude for u in updates if u.magnitude is not None]))


def _check_experts(model: nn.Module, present: dict[Projection, LowRank], adapter: Adapter) -> None:
    """The experts of a layer are computed together, so their updates are of one shape."""
    shapes = {p.place[:2]: (u.rank, u.scale) for p, u in present.items() if p.expert is not None}
    for p in projections(model) if shapes else ():
        if p.expert is None or p.place[:2] not in shapes:
            continue
        update = present.get(p)
        if update is None or (update.rank, update.scale) != shapes[p.place[:2]]:
            raise CheckpointError(
                f"{p.public} has {'no update' if update is None else 'another rank or scale'}, unlike other experts "
                "of its layer",
                where=adapter.where,
                fix="merge it into the base where it was made",
            )


def _parts(adapter: Adapter) -> list[str]:
    return sorted({short_name_of(public) for public in adapter.updates})


def places(model: nn.Module, adapter: Adapter) -> dict[Projection, LowRank]:
    """Each update with its place in the model; names or shapes the model does not have are refused."""
    _check_head(model, adapter)
    by_name = {p.public: p for p in projections(model)}
    strange = [name for name in adapter.updates if name not in by_name]
    if strange:
        raise CheckpointError(
            f"{counted(len(strange), 'adapted layer is', 'adapted layers are')} not in this model, e.g. {strange[0]}",
            where=adapter.where,
            fix="the adapter belongs to another base model" + (f": {adapter.base}" if adapter.base else ""),
        )
    out = {}
    for public, projection in by_name.items():
        update = adapter.updates.get(public)
        if update is None:
            continue
        want = ((update.rank, projection.in_features), (projection.rows, update.rank))
        got = (tuple(update.A.shape), tuple(update.B.shape))
        if got != want:
            raise CheckpointError(
                f"the update of {public} is {got[1]} x {got[0]}; this model needs {want[1]} x {want[0]}",
                where=adapter.where,
                fix="the adapter belongs to another base model" + (f": {adapter.base}" if adapter.base else ""),
            )
        out[projection] = update
    return out


def _check_head(model: nn.Module, adapter: Adapter) -> None:
    if adapter.head is None:
        return
    classes, hidden = len(config_of(model).labels), config_of(model).hidden_size
    if tuple(adapter.head.shape) != (classes, hidden):
        has = f"a score head of {counted(classes, 'class', 'classes')}" if classes else "no score head"
        raise CheckpointError(
            f"the adapter has a score head {list(adapter.head.shape)}; this model, {hidden} wide, has {has}",
            where=adapter.where,
            fix="stage: RM or CLS trains on from it, with its own classes; for other stages take another adapter",
        )
