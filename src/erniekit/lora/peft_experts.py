"""What PEFT needs for a model with experts, on transformers 5: experts are two fused 3-D parameters there, so all but
attention is named in `target_parameters`, while the file keeps a tensor for each expert (PEFT fuses them on reading).

`target_modules: [gate_proj, ...]` would not do: PEFT turns those names into the routed experts' parameters only and
leaves the dense first layers and the shared experts without adapters. Called by peft_files.py. E experts, r rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from erniekit.lora.adapter import Adapter, LowRank, places
from erniekit.lora.projections import Projection, config_of, projections, short_names

FUSED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
_FUSED_NAME = re.compile(r"(.+\.mlp\.experts)((?:\.base_layer)*)")


@dataclass
class Named:
    """The part of adapter_config.json on which weights are adapted, and how those that differ do."""

    target_modules: list[str] = field(default_factory=list)
    target_parameters: list[str] = field(default_factory=list)
    ranks: dict[str, int] = field(default_factory=dict)  # by PEFT's name of module or parameter
    scales: dict[str, float] = field(default_factory=dict)


def has_experts(model: nn.Module) -> bool:
    return config_of(model).moe is not None


def parameter_of(p: Projection) -> str:
    """transformers' name of the parameter a projection is in: its own, or its layer's experts' fused one."""
    if p.expert is None:
        return p.public + ".weight"
    experts, _, part = re.sub(r"\.\d+(\.\w+)$", r"\1", p.public).rpartition(".")
    return f"{experts}.{FUSED[part]}"


def named(adapter: Adapter, model: nn.Module) -> Named:
    placed = places(model, adapter)
    out = Named()
    attention = [p for p in placed if ".self_attn." in p.public]
    out.target_modules = short_names([p.public for p in attention], model)
    for p in attention:
        out.ranks[p.public], out.scales[p.public] = placed[p].rank, placed[p].scale
    covered = {p: u for p, u in placed.items() if ".self_attn." not in p.public}
    every = [parameter_of(p) for p in projections(model) if ".self_attn." not in p.public]
    out.target_parameters = _short(every, {parameter_of(p) for p in covered})
    for p, update in covered.items():
        name = parameter_of(p)
        # gate and up of an expert are stacked: [A_gate; A_up] with a block-structured B.
        halves = 2 if p.expert is not None and FUSED[p.part] != p.part else 1
        out.ranks[name], out.scales[name] = update.rank * halves, update.scale
    return out


def _short(every: Iterable[str], covered: set[str]) -> list[str]:
    """Their last two parts, where all parameters that end so are covered; else whole names."""
    ends: dict[str, set[str]] = {}
    for name in every:
        ends.setdefault(".".join(name.split(".")[-2:]), set()).add(name)
    out = []
    for end, names in ends.items():
        out += [end] if names <= covered else sorted(names & covered)
    return out


def patterns(values: Mapping[str, Any]) -> dict[str, Any]:
    """PEFT's rank_pattern or alpha_pattern; one line for all that end in the same two parts and have one value."""
    ends: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        ends.setdefault(".".join(name.split(".")[-2:]), {})[name] = value
    out: dict[str, Any] = {}
    for end, group in ends.items():
        if len(set(group.values())) == 1 and len(group) > 1:
            out[re.escape(end)] = next(iter(group.values()))
        else:
            out |= {re.escape(name): value for name, value in group.items()}
    return out


def completed(adapter: Adapter, model: nn.Module) -> Adapter:
    """Zeros for what PEFT cannot leave out: gate and up are one parameter to it, and where that one is adapted its
    reading of per-expert files takes for granted that `down_proj` is, too."""
    updates = dict(adapter.updates)
    by_expert: dict[tuple[str, int], list[Projection]] = {}
    for p in projections(model):
        if p.expert is not None:
            by_expert.setdefault((p.module.rpartition(".")[0], p.expert), []).append(p)
    for group in by_expert.values():
        like = next((updates[p.public] for p in group if p.part != "down_proj" and p.public in updates), None)
        for p in group:
            if like is not None and p.public not in updates:
                A, B = like.A.new_zeros(like.rank, p.in_features), like.B.new_zeros(p.rows, like.rank)
                updates[p.public] = LowRank(A, B, like.scale)
    return replace(adapter, updates=updates)


def is_left_out(name: str, A: torch.Tensor, B: torch.Tensor) -> bool:
    """An expert's update of zeros on both sides can never learn: it stands for a part that is not adapted."""
    return ".experts." in name and not A.any() and not B.any()


def fused_of(name: str, model: nn.Module, A: torch.Tensor, B: torch.Tensor) -> list[Projection]:
    """The projections of a layer's fused parameter as PEFT itself saves it: `...mlp.experts[.base_layer]`.

    Which of the two parameters it is shows only in the shapes: the wrappers are nested in the order they were made."""
    match = _FUSED_NAME.fullmatch(name)
    if match is None or not has_experts(model):
        return []
    here = [p for p in projections(model) if p.expert is not None and p.public.startswith(match[1] + ".")]
    up = [p for p in here if FUSED[p.part] == "gate_up_proj"]
    down = [p for p in here if FUSED[p.part] == "down_proj"]
    for group in (up, down):
        experts = len({p.expert for p in group})
        rows = sum(p.rows for p in group) // max(1, experts)
        if group and A.shape[1] == group[0].in_features and B.shape[0] == rows and A.shape[0] % experts == 0:
            return group
    return []


def unfused(group: list[Projection], A: torch.Tensor, B: torch.Tensor, scale: float) -> dict[str, LowRank]:
    """A [E * r, in]: expert after expert; B [rows, r * E]: the experts of the first rank, of the second, ..."""
    experts = len({p.expert for p in group})
    As = A.view(experts, -1, A.shape[1])
    Bs = B.view(B.shape[0], -1, experts).permute(2, 0, 1)
    out = {}
    for p in group:
        assert p.expert is not None
        first = p.start - p.expert * B.shape[0]  # the expert's own rows begin there
        out[p.public] = LowRank(As[p.expert], Bs[p.expert, first : first + p.rows].contiguous(), scale)
    return out
