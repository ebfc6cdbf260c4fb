"""Which weights are trained, by patterns over their names (`train_only`, `freeze`). Called by recipes/.

A pattern is a glob. It is compared with our name of a tensor (layers.0.attn.qkv.weight), with each name the model's
files use (model.layers.0.self_attn.q_proj.weight), and with every dotted beginning of both, so that `model.layers.0`
means the whole layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from erniekit.errors import ConfigError
from erniekit.models import MODELS
from erniekit.registry import nearest

SHOWN = 3  # names in a message


def set_trained(model: nn.Module, train_only: Sequence[str], freeze: Sequence[str]) -> None:
    """Patterns take weights out of training, never into it: what is frozen already stays so."""
    if not train_only and not freeze:
        return
    names = _public_names(model)
    resting = {name for name, param in model.named_parameters() if not param.requires_grad}
    kept = _matched(train_only, names, "train_only") if train_only else set(names)
    _refuse_resting(kept & resting if train_only else set(), train_only, names)
    left_out = _matched(freeze, names, "freeze") if freeze else set()
    for name, param in model.named_parameters():
        if name not in kept or name in left_out:
            param.requires_grad_(False)
    if not any(param.requires_grad for param in model.parameters()):
        raise ConfigError(
            "no weight is left to train",
            where=" and ".join(key for key, given in (("train_only", train_only), ("freeze", freeze)) if given),
            fix="take a pattern out: freeze is applied to what train_only leaves",
        )


def _public_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Our name of each weight -> its names in the model's files."""
    config: Any = model.config
    entries = MODELS.get(config.family).names(config, "hf")
    public = {entry.ours: entry.theirs for entry in entries if not entry.copy_of}
    return {name: public.get(name, ()) for name, _ in model.named_parameters()}


def _matched(patterns: Sequence[str], names: dict[str, tuple[str, ...]], key: str) -> set[str]:
    """Our names that the patterns mean. Parts of a fused tensor count only together."""
    hits: set[str] = set()
    parts: set[str] = set()
    for pattern in patterns:
        ours = {name for name in names if _matches(pattern, name)}
        theirs = {public for publics in names.values() for public in publics if _matches(pattern, public)}
        if not ours and not theirs:
            raise _nothing(pattern, names, key)
        hits |= ours
        parts |= theirs
    for name, publics in names.items():
        found = [public for public in publics if public in parts]
        if found and len(found) < len(publics) and name not in hits:
            unmatched = [public for public in publics if public not in parts]
            raise ConfigError(
                f"{found[0]} is one tensor with {_listed([_last_parts(public) for public in unmatched])}, and "
                f"{'they match' if len(unmatched) > 1 else 'that matches'} no pattern",
                where=key,
                fix="name all of them: " + ",".join(dict.fromkeys(f"*.{public.split('.')[-2]}" for public in publics)),
            )
        if found:
            hits.add(name)
    return hits


def _matches(pattern: str, name: str) -> bool:
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _last_parts(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _nothing(pattern: str, names: dict[str, tuple[str, ...]], key: str) -> ConfigError:
    known = [known for ours, publics in names.items() for known in (*publics, ours)]
    begun = {".".join(name.split(".")[:end]) for name in known for end in range(1, name.count(".") + 2)}
    near = nearest(pattern, sorted(begun), SHOWN)
    fix = f"nearest names: {', '.join(near)}" if near else f"names look like {_listed(known)}"
    if pattern.startswith("lm_head") and not any(name.startswith("score") for name in known):
        fix = "its head is tied to the embedding, one weight of both: name model.embed_tokens"
    elif pattern == "mtp":
        fix = "it has no layers that predict further tokens"
    return ConfigError(f"{pattern!r} matches no weight of this model", where=key, fix=fix)


def _refuse_resting(resting: set[str], patterns: Sequence[str], names: dict[str, tuple[str, ...]]) -> None:
    """A pattern that names only weights this run leaves as they are would train nothing."""
    for pattern in patterns:
        hits = [n for n, publics in names.items() if any(_matches(pattern, each) for each in (n, *publics))]
        if not hits or not all(name in resting for name in hits):
            continue
        mtp = hits[0].startswith("mtp.")
        raise ConfigError(
            f"{pattern!r} matches only weights that this run does not train, e.g. {hits[0]}",
            where="train_only",
            fix="set num_nextn_predict_layers to the number of these layers to train them"
            if mtp
            else "choose others, or change freeze_config or the router's keys that freeze these",
        )
