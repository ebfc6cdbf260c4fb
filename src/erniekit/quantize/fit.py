"""Whether a number format fits a model's widths, and the group size where none was asked for. Called by run.py."""

from __future__ import annotations

from dataclasses import replace

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.errors import CheckpointError, ConfigError, LaterError
from erniekit.models.config import DecoderConfig
from erniekit.quant_schemes import CHANNEL, QuantRecipe, Scheme

GROUPS = (128, 64, 32)  # what kernels of serving engines have; the first that fits is taken


def require_plain(source: ModelFolder) -> None:
    if source.config.vision is not None:
        raise LaterError(
            "quantising a model that sees is not in this version",
            where=f"model_name_or_path: {source.path}",
            fix="serve it in 16 bit, or let the server quantise it",
        )
    if source.quantised:
        kind = next(iter(source.quantised.values())).scheme
        raise CheckpointError(
            f"this model is quantised already ({kind.format}, {kind.bits} bits)",
            where=f"model_name_or_path: {source.path}",
            fix="name the 16-bit model it was made from: rounding twice loses twice",
        )


def fitted(recipe: QuantRecipe, config: DecoderConfig, group: int | None) -> QuantRecipe:
    """The recipe with the group size that was asked for, or the largest that fits; refused where nothing does."""
    widths = input_widths(config)
    if group is not None and not recipe.takes_groups:
        raise ConfigError(
            "this kind has no group size to choose",
            where=f"quant_group_size: {group}",
            fix="leave it out; w4a16 and w8a16 have one",
        )
    if group is not None:
        if group != CHANNEL and group not in GROUPS:
            raise ConfigError(
                f"groups of {group} are read by no engine",
                where="quant_group_size",
                fix=f"one of {', '.join(map(str, GROUPS))}, or {CHANNEL} for a scale for each row",
            )
        one = len(recipe.schemes) == 1  # of a mixed one the group is that of the kind that has groups
        recipe = replace(recipe, experts=_resized(recipe.experts, group, one), rest=_resized(recipe.rest, group, one))
    elif recipe.takes_groups:
        grouped = [width for name, width in widths.items() if _scheme(recipe, name).strategy == "group"]
        best = next((size for size in GROUPS if all(width % size == 0 for width in grouped)), None)
        if grouped and best is not None:
            recipe = replace(recipe, experts=_resized(recipe.experts, best), rest=_resized(recipe.rest, best))
    for name, width in widths.items():
        _require(name, width, _scheme(recipe, name))
    return recipe


def input_widths(config: DecoderConfig) -> dict[str, int]:
    """Columns of every kind of weight that is quantised."""
    out = {"qkv": config.hidden_size, "attention output": config.num_heads * config.head_dim}
    if any(not config.sparse(k) for k in range(config.num_layers)):
        out["down projection"] = config.intermediate_size
    if config.moe is not None:
        out["expert gate and up"], out["expert down projection"] = config.hidden_size, config.moe.width
        if config.moe.shared_width:
            out["shared experts' down projection"] = config.moe.shared_width
    return out


def _scheme(recipe: QuantRecipe, name: str) -> Scheme:
    return recipe.experts if name.startswith("expert ") else recipe.rest


def _resized(scheme: Scheme, group: int, always: bool = False) -> Scheme:
    return scheme.with_group(group) if always or scheme.strategy == "group" else scheme


def _require(name: str, width: int, scheme: Scheme) -> None:
    unit = scheme.group if scheme.group and scheme.number != "nf4" else 1
    if scheme.format == "pack-quantized":
        unit = max(unit, 32 // scheme.bits)
    if scheme.number == "nf4":
        unit = 2
    if width % unit:
        sizes = [size for size in GROUPS if width % size == 0]
        fix = f"quant_group_size: {sizes[0]} divides it" if sizes else f"quant_group_size: {CHANNEL}, or quant: w8a8"
        what = f"groups of {scheme.group}" if scheme.group else f"{unit} numbers a word"
        raise ConfigError(
            f"the {name} has {width} columns, which {what} do not divide",
            where="quant_group_size",
            fix=fix if scheme.number == "int" else "choose another quant",
        )
