"""The table every LoRA file works from: each adaptable projection of a model, where it lives and what others call it.

Read off the model's own weight-name tables, so a new family needs nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from torch import nn

from erniekit.errors import ConfigError
from erniekit.log import warn_once
from erniekit.lora.layers import LoRAExperts, LoRALayer, LoRARouter, experts_of, kind_of, layer_parts, weight_like
from erniekit.model_contract import spread
from erniekit.models import MODELS
from erniekit.models.family_check import declared
from erniekit.printable import counted
from erniekit.registry import nearest

if TYPE_CHECKING:
    from erniekit.models.config import DecoderConfig

KEY = "lora_target_modules"


class Projection(NamedTuple):  # a tuple, as a model with many experts has tens of thousands
    public: str  # model.layers.0.self_attn.q_proj: the name in transformers and PEFT
    paddle: str  # ernie.layers.0.self_attn.qkv_proj, the same for parts Paddle keeps fused; `public` without a layout
    module: str  # layers.0.attn.qkv
    part: str  # q_proj
    start: int  # its rows in the module's weight
    stop: int
    in_features: int
    expert: int | None = None  # which of the layer's experts it belongs to
    router: bool = False  # adapted only where a target names routers and nothing else

    @property
    def place(self) -> tuple[str, str, int]:
        """Where its update is: the module, the part, the expert (0 in a plain layer)."""
        return self.module, self.part, self.expert or 0

    @property
    def short_name(self) -> str:
        """The name by which a target selects all projections of its kind."""
        return short_name_of(self.public)

    @property
    def weight(self) -> str:
        """Our name of the tensor it is a part of, whether adapted or not."""
        return self.module + ".weight"

    @property
    def rows(self) -> int:
        return self.stop - self.start


def short_name_of(public: str) -> str:
    """The last part of a name; of a layer that has a number, its list's name as well: spatial_linear.0."""
    before, _, last = public.rpartition(".")
    return f"{before.rpartition('.')[2]}.{last}" if last.isdigit() else last


def config_of(model: nn.Module) -> DecoderConfig:
    return cast("DecoderConfig", model.config)


def projections(model: nn.Module) -> list[Projection]:
    """Every projection the family lets LoRA adapt, in model order. Works on a meta model and on an adapted one.

    Layers that predict further tokens (mtp) are not among them.
    """
    config = config_of(model)
    spec = MODELS.get(config.family)
    targets = frozenset(spec.lora_targets)
    other = "paddle" if spec.paddle_prefix else "hf"
    in_paddle = {e.ours: e.theirs for e in spec.names(config, other) if not e.copy_of}
    adapted = ("layers.", *(prefix for tower in spread(model).towers().values() for prefix in tower.adapts))
    found = []
    for entry in spec.names(config, "hf"):
        module_name, _, leaf = entry.ours.rpartition(".")
        if leaf != "weight" or not module_name.startswith(adapted):
            continue
        module = model.get_submodule(module_name)
        base: nn.Module = module.base if isinstance(module, LoRALayer) else module
        kind = kind_of(base)
        if kind is None:
            continue
        publics = [name.removesuffix(".weight") for name in entry.theirs]
        paddles = [name.removesuffix(".weight") for name in in_paddle[entry.ours]]
        parts = layer_parts(base, short_name_of(publics[0]).replace(".", "_"))
        start, width = 0, weight_like(base).shape[1]
        for i, public in enumerate(publics):
            part, rows = parts[i % len(parts)]
            if kind is LoRARouter or short_name_of(public) in targets:
                paddle = paddles[i * len(paddles) // len(publics)]  # Paddle keeps some parts fused
                place = (module_name, part, start, start + rows, width)
                expert = i // len(parts) if kind is LoRAExperts else None
                found.append(Projection(public, paddle, *place, expert, kind is LoRARouter))
            start += rows
        if len(publics) != len(parts) * experts_of(base):
            raise ConfigError(
                f"{entry.ours} is stored as {counted(len(publics), 'tensor')} and its module holds "
                f"{counted(len(parts) * experts_of(base), 'projection')}, so that LoRA cannot tell them apart",
                where=declared(spec, "names"),
                fix="a FusedLinear names the projections of its rows, one for each tensor (docs/adding-a-model.md)",
            )
    unmet = targets - {p.short_name for p in found}
    if unmet and MODELS.distribution(spec.name):  # a built-in table covers more than one kind of model
        names = ", ".join(sorted(unmet))
        warn_once(f"lora_targets of family {spec.name}: the model has no {names} that LoRA could adapt")
    return found


def select(model: nn.Module, targets: Sequence[str] | None) -> list[Projection]:
    """What `targets` name: each is a name (q_proj; Paddle's qkv_proj), the dotted end of one, or a regex.

    Routers are not adapted by default: a target takes them in only if it matches nothing else (`gate`).
    """
    candidates = projections(model)
    if targets is None:
        usual = [p for p in candidates if not p.router]
        if not usual:
            spec = MODELS.get(config_of(model).family)
            raise ConfigError(
                f"LoRA would adapt nothing: a model of family {spec.name} has none of its lora_targets, "
                + (", ".join(spec.lora_targets) or "which are none"),
                where=declared(spec, "lora_targets"),
                fix="name projections as the model's files do, without what is before their last dot "
                "(docs/adding-a-model.md), or fine_tuning: Full",
            )
        return usual
    by_name = {p.public: p for p in candidates}
    chosen: set[Projection] = set()
    for target in targets:
        if target in by_name:
            chosen.add(by_name[target])
            continue
        pattern = _compile(target)
        hits = {p for p in candidates if pattern.fullmatch(p.public) or pattern.fullmatch(p.paddle)}
        if not hits:
            raise _nothing_matches(model, target, pattern, candidates)
        others = {p for p in hits if not p.router}
        chosen |= others or hits
    _need_all_experts(candidates, chosen)
    return [p for p in candidates if p in chosen]


def _need_all_experts(candidates: list[Projection], chosen: set[Projection]) -> None:
    """The experts of a layer are one grouped product, and PEFT's files hold them only together."""
    begun = {p.place[:2] for p in chosen if p.expert is not None}
    missing = next((p for p in candidates if p.place[:2] in begun and p not in chosen), None)
    if missing is not None:
        raise ConfigError(
            f"some experts of a layer are named and others, such as {missing.public}, are not",
            where=KEY,
            fix=f"name all of them or none, e.g. .*\\.experts\\..*\\.{missing.part}",
        )


def short_names(adapted: Sequence[str], model: nn.Module) -> list[str]:
    """Public paths as PEFT writes targets: short names when every projection of that name is there, else whole
    paths."""
    present = set(adapted)
    names = sorted({short_name_of(public) for public in adapted})
    selected = {p.public for p in projections(model) if p.short_name in names}
    return names if selected == present else sorted(present)


def _compile(target: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"(.*\.)?(?:{target})")
    except re.error as error:
        raise ConfigError(
            f"{target!r} is neither a layer name nor a regular expression: {error}",
            where=KEY,
            fix="use names such as q_proj, or a regex such as .*layers\\.[0-3]\\..*",
        ) from None


def _nothing_matches(
    model: nn.Module, target: str, pattern: re.Pattern[str], candidates: list[Projection]
) -> ConfigError:
    config = config_of(model)
    named = [n for e in MODELS.get(config.family).names(config, "hf") for n in e.theirs]
    others = {name.rpartition(".")[0] for name in named} - {p.public for p in candidates}
    others |= {"lm_head", "model.embed_tokens"}
    refused = next((name for name in sorted(others) if pattern.fullmatch(name)), None)
    names = sorted({p.short_name for p in candidates} | {short_name_of(p.paddle) for p in candidates})
    if refused is not None:
        return ConfigError(
            f"{target!r} names {refused}, which LoRA does not adapt: adapters go on attention, MLP and expert "
            "projections; head, embeddings, norms and layers that predict further tokens stay as they are",
            where=KEY,
            fix="take it out, or train every weight with fine_tuning: Full",
        )
    near = nearest(target, names, 3)
    return ConfigError(
        f"{target!r} matches no layer of this model",
        where=KEY,
        fix=f"did you mean {' or '.join(near)}?" if near else "choose from: " + ", ".join(names),
    )
