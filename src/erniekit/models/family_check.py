"""Whether what a family declares fits the model that it builds: its weight names and how its weights shard.

Called where a model is built without memory, before a weight is read, trained or written.

A weight that no name stands for would be trained and then left out of the files; two that are stored under one name
would overwrite each other; a rule on a module that parallel/ does not cut would leave a rank with unfilled memory.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from erniekit.errors import ConfigError
from erniekit.model_contract import bare, parts_of, weight_holder
from erniekit.models import MODELS, family_of
from erniekit.models.config import DecoderConfig
from erniekit.models.promised import PAGE, Promised
from erniekit.parallel.plan import Plan, Rule, rule_of
from erniekit.printable import plain
from erniekit.registry import nearest

if TYPE_CHECKING:
    from erniekit.models.names import Entry
    from erniekit.models.spec import ModelSpec

SHOWN = 3  # names in a message
# What `vocab()` cuts: parallel/ knows these three by name.
VOCABULARY = ("embed", "head", "head_bias")


def check_names(spec: ModelSpec, config: DecoderConfig, layout: str, model: nn.Module, sizes: bool = True) -> None:
    """Every weight of the model has one entry of this layout, and every entry a weight that fits it. sizes=False: they
    are compared with files later (`stored_tensors`)."""
    state, entries = model.state_dict(), spec.entries(config, layout)
    where = f"{declared(spec, 'names')}, layout {layout}"
    own = [entry for entry in entries if not entry.copy_of]
    named = {entry.ours for entry in own}
    if missing := sorted(state.keys() - named):
        raise ConfigError(
            f"weights of a {spec.name} model have no name in its files, so that training them would lose them: "
            + _shown(missing),
            where=where,
            fix=f"add an Entry for each to `names` of the family ({PAGE}): erniekit.models.names has the usual ones",
        )
    if unknown := sorted(named - state.keys()):
        near = nearest(unknown[0], list(state))
        raise ConfigError(
            f"`names` of family {spec.name} has entries for weights that its model has not: {_shown(unknown)}",
            where=where,
            fix=f"did you mean {near[0]!r}?" if near else f"take them out, or let `build` make these weights ({PAGE})",
        )
    _refuse_repeated(spec, "ours", (entry.ours for entry in own), where)
    _refuse_repeated(spec, "theirs", (name for entry in entries for name in entry.theirs), where)
    for entry in own if sizes else ():
        stored_tensors(entry, state[entry.ours].shape, where)


def _refuse_repeated(spec: ModelSpec, which: str, names: Iterable[str], where: str) -> None:
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        what = "is stored by several entries, of which the last would be kept"
        if which == "theirs":
            what = "is the name in a file of several tensors, of which the last would be kept"
        raise ConfigError(
            f"family {spec.name}: {repeated[0]} {what}"
            + (f"; so are {len(repeated) - 1} more" if len(repeated) > 1 else ""),
            where=where,
            fix=f"give each weight one Entry and each tensor of a file a name of its own ({PAGE})",
        )


def stored_tensors(entry: Entry, shape: Sequence[int], where: str) -> list[torch.Tensor]:
    """What a weight of this shape is stored as, without memory. Raises where the entry does not fit the weight."""
    whole = torch.empty(tuple(shape), device="meta")  # not empty_like: it imports torch's compiler, which takes seconds
    try:
        stored = entry.write(whole)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise _unfit(entry, shape, str(error).splitlines()[0] if str(error) else type(error).__name__, where) from error
    if len(stored) != len(entry.theirs):
        raise _unfit(entry, shape, f"it makes {len(stored)} tensors for {len(entry.theirs)} names", where)
    if sum(tensor.numel() for tensor in stored) != whole.numel():  # reading back on meta imports the compiler, too
        raise _unfit(entry, shape, f"it stores {[list(tensor.shape) for tensor in stored[:SHOWN]]}", where)
    return stored


def _unfit(entry: Entry, shape: Sequence[int], problem: str, where: str) -> ConfigError:
    return ConfigError(
        f"the entry of {entry.ours} does not fit that weight, {list(shape)}: {problem}",
        where=where,
        fix=f"correct its sizes, or the shape that the model gives {entry.ours}; its files have {_shown(entry.theirs)}",
    )


def check_config(spec: ModelSpec, config: DecoderConfig, layout: str) -> None:
    """What would be written beside the weights is JSON, and read as a model of this family: a folder that cannot be
    opened, or that is opened as another model, would show only after the training."""
    where = declared(spec, "write_config")
    written = spec.config_json(config, layout, "bfloat16")
    try:
        json.dumps(written, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"what `write_config` of family {spec.name} gave cannot be written as JSON: {error}",
            where=where,
            fix=f"text, numbers, lists and dicts alone ({PAGE})",
        ) from error
    if spec.name not in MODELS:
        return  # made in a program, where config.json does not name it
    kind, read_as = written.get("model_type"), family_of(written)
    if read_as != spec.name:
        raise ConfigError(
            f"`write_config` of family {spec.name} writes model_type {plain(repr(kind), 60)}, which is "
            + (f"read as a model of family {read_as}" if read_as in MODELS else "no family's"),
            where=where,
            fix=f'{{**written, "model_type": {spec.name!r}}} ({PAGE})',
        )


def check_plan(spec: ModelSpec, config: DecoderConfig, model: nn.Module) -> None:
    """Every rule that cuts is on a module that parallel/ cuts, of a shape that the rule can cut."""
    _refuse_shared(spec, model)
    towers: Any = getattr(model, "towers", dict)()
    plan: Plan = {pattern: rule for tower in towers.values() for pattern, rule in tower.plan.items()} | spec.plan
    for pattern, rule in plan.items():
        if not isinstance(rule, Rule):
            raise _bad_rule(spec, pattern, f"is {rule!r}, not a rule", "column(), row(), heads() ... are called")
    for name, module in model.named_modules():
        for leaf, param in module.named_parameters(recurse=False):
            owner = name or leaf
            rule = rule_of(plan, owner)
            if rule.is_whole:
                continue
            if problem := _problem(rule, owner, module, tuple(param.shape), leaf, config):
                pattern = next(p for p, found in plan.items() if found is rule and rule_of({p: rule}, owner) is rule)
                fix = "replicate(), or dealt() for what each rank applies to its own heads, keeps it whole"
                raise _bad_rule(spec, pattern, problem, fix)


def _refuse_shared(spec: ModelSpec, model: nn.Module) -> None:
    """A module with weights that has two places would be cut, adapted and stored twice."""
    first: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if first.setdefault(module, name) != name and next(module.parameters(recurse=False), None) is not None:
            raise ConfigError(
                f"family {spec.name}: {first[module]} and {name} are one module",
                where=declared(spec, "build"),
                fix=f"make one for each place; tied embeddings are `tie_word_embeddings` of DecoderConfig ({PAGE})",
            )


def _bad_rule(spec: ModelSpec, pattern: str, problem: str, fix: str) -> ConfigError:
    return ConfigError(
        f"family {spec.name}: the sharding rule of {pattern!r} {problem}",
        where=f"{declared(spec, 'build')}: plan",
        fix=f"{fix} ({PAGE})",
    )


def _problem(
    rule: Rule, owner: str, module: nn.Module, shape: tuple[int, ...], leaf: str, config: DecoderConfig
) -> str:
    """Why a rule that cuts cannot be kept for a parameter; empty: it can."""
    kind = f"{rule.kind}()"
    if rule.kind == "vocab":
        others = f"cuts a vocabulary: {', '.join(VOCABULARY)}; {owner} is none of them"
        return "" if owner in VOCABULARY else f"is {kind}, which {others}"
    if rule.is_experts:
        fits = weight_holder(module) is not None and not isinstance(module, nn.Linear)
        return "" if fits else f"is {kind}, which cuts an ExpertLinear; {owner} is a {_kind(module)}"
    if not isinstance(bare(module), nn.Linear) or weight_holder(module) is None:
        return f"is {kind}, which cuts erniekit's Linear and FusedLinear; {owner} is a {_kind(module)}"
    rows = shape[0]
    if rule.kind == "column" and rows % rule.parts:
        return f"is column({rule.parts}), and the {rows} rows of {owner} are not {rule.parts} equal parts"
    sizes = [size for _, size in parts_of(module) or ()]
    if rule.kind == "column" and sizes and (len(set(sizes)) > 1 or rule.parts % len(sizes)):
        return f"is column({rule.parts}), and {owner} holds {len(sizes)} projections, of {sizes} rows"
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if rule.kind == "heads" and (sizes or [rows]) not in ([q, kv, kv], [q + 2 * kv]):
        return f"is heads(), which cuts a fused qkv of {q} + {kv} + {kv} rows; {owner} has {sizes or rows}"
    if rule.kind == "heads_in" and leaf == "weight" and shape[1] != q:
        return f"is heads_in(), which cuts {q} columns, of the query heads; {owner} has {shape[1]}"
    return ""


def _kind(module: nn.Module) -> str:
    kind = type(module)
    return f"{kind.__name__} of {kind.__module__.partition('.')[0]}"


def declared(spec: ModelSpec, field: str) -> str:
    """Where a family's code is: the module of what it gives for a field."""
    function = getattr(spec, field)
    return function.place if isinstance(function, Promised) else f"`{field}` of family {spec.name}"


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
