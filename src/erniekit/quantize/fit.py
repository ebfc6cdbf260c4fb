"""Whether a number format fits a model's widths, and the group size where none was requested.

Called by recipes/quantize.py.
"""

from __future__ import annotations

from dataclasses import replace

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.errors import CheckpointError, ConfigError, NotYetSupportedError
from erniekit.models.config import DecoderConfig
from erniekit.quant_schemes import CHANNEL, QuantRecipe, Scheme

GROUPS = (128, 64, 32)  # what kernels of serving engines have; the first that fits is taken


def require_plain(source: ModelFolder) -> None:
    if source.config.vision is not None:
        raise NotYetSupportedError(
            "quantising a vision-language model is not in this version",
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
    """The recipe with the requested group size, or the largest that fits; refused where nothing does."""
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
        recipe = _with_group(recipe, group)
    elif recipe.takes_groups:
        grouped = [width for name, width in widths.items() if _scheme(recipe, name).strategy == "group"]
        best = next((size for size in GROUPS if all(width % size == 0 for width in grouped)), None)
        if grouped and best is not None:
            recipe = replace(recipe, experts=_resized(recipe.experts, best), rest=_resized(recipe.rest, best))
    _require(recipe, widths)
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


def _with_group(recipe: QuantRecipe, group: int) -> QuantRecipe:
    one = len(recipe.schemes) == 1  # of a mixed one the group is that of the kind that has groups
    return replace(recipe, experts=_resized(recipe.experts, group, one), rest=_resized(recipe.rest, group, one))


def _resized(scheme: Scheme, group: int, always: bool = False) -> Scheme:
    return scheme.with_group(group) if always or scheme.strategy == "group" else scheme


def _require(recipe: QuantRecipe, widths: dict[str, int]) -> None:
    for name, width in widths.items():
        scheme = _scheme(recipe, name)
        if width % _unit(scheme) == 0:
            continue
        what = f"groups of {scheme.group}" if width % (scheme.group or 1) else f"{_unit(scheme)} numbers a word"
        fix = "quant=w8a8, fp8_dynamic or nf4, which take any width"
        if (size := _fitting_group(recipe, widths)) is not None:
            fix = f"quant_group_size: {size} divides all widths" if size != CHANNEL else f"quant_group_size: {CHANNEL}"
        raise ConfigError(
            f"the {name} has {width} columns, which {what} do not divide",
            where="quant_group_size" if recipe.takes_groups else "quant",
            fix=fix,
        )


def _unit(scheme: Scheme) -> int:
    """Columns must be a multiple of it."""
    if scheme.number == "nf4":  # in blocks of the flattened weight, the last of which may be shorter
        return 1
    packed = 32 // scheme.bits if scheme.format == "pack-quantized" else 1
    return max(scheme.group or 1, packed)


def _fitting_group(recipe: QuantRecipe, widths: dict[str, int]) -> int | None:
    """A group size with which everything fits; None: there is none."""
    for size in (*GROUPS, CHANNEL) if recipe.takes_groups else ():
        other = _with_group(recipe, size)
        if all(width % _unit(_scheme(other, name)) == 0 for name, width in widths.items()):
            return size
    return None
