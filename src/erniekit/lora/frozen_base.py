"""The frozen side of LoRA in other stored kinds than plain: `frozen_base`. Called by recipes/build.py;
`packing` by chat, server and eval.

The plain weights are never whole in the device's memory: each is packed as it is filled. Whatever needs them (merging,
exporting, resuming) reads them from their folder. Embeddings, head, norms, routers and layers without adapters stay
plain.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.errors import ConfigError
from erniekit.kernels.stored import PLAIN, kind_named
from erniekit.log import emit, warn
from erniekit.lora.layers import LoRAExperts, LoRALinear, experts_of
from erniekit.model_contract import packed_layers
from erniekit.models.layers.linear import HoldsWeight
from erniekit.weight_kinds import BF16, kinds_of, role_of, with_products


def check(base: str, products: str, device: torch.device, experts: bool, where: str) -> None:
    """Before anything is loaded: whether this run's device can multiply by such a base."""
    for role, kind in kinds_of(base).items():
        held, *_ = with_products(kind, products)
        if role == "experts" and not experts:
            continue
        if (reason := kind_named(held).why_not(device, role == "experts")) is not None:
            key, value = ("frozen_base", base) if held == kind else ("frozen_products", products)
            raise ConfigError(f"{key}: {value} does not run here: {reason}", where=where, fix=f"{key}: bf16")


def on_grid(base: str, name: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight [rows, in] as `base` would keep it, unpacked to its dtype; as it is where that keeps it plain."""
    kind = kind_named(kinds_of(base).get(role_of(name), PLAIN))
    if kind.name == PLAIN or not kind.fits(*weight.shape):
        return weight
    return kind.unpack(kind.pack(weight), weight.dtype)


def store_linears(model: nn.Module, base: str, only: Collection[str] | None = None) -> list[str]:
    """The same for a model that is not trained: every linear and expert of its layers, adapted or not, or those named
    `only`. The head, routers and layers that predict further tokens stay plain."""
    unpacked, kinds = [], kinds_of(base)
    for name, layer in model.named_modules():
        if not name.startswith("layers.") or not isinstance(layer, HoldsWeight) or (only and name not in only):
            continue
        kind, experts = kind_named(kinds[role_of(name)]), experts_of(layer)
        if kind.name == PLAIN:
            continue
        rows, width = layer.held_shape
        if kind.fits(rows // experts, width):
            layer.store_as(kind.name)
        else:
            unpacked.append(name)
    return unpacked


def packing(
    weights: ModelFolder,
    base: str,
    device: str | torch.device,
    print_line: Callable[[str], object] = emit,
    only: Collection[str] | None = None,
) -> Callable[[nn.Module], None] | None:
    """What `ModelFolder.build` takes to keep weights as `base` does; None: as they are. only: these layers, as a run
    does that packs what it adapts; else all."""
    if base == BF16:
        return None
    if weights.quantised:
        warn(f"these weights are quantised already: they are not packed as {base} on top of that")
        return None
    check(base, BF16, torch.device(device), weights.config.moe is not None, str(weights.path))

    def store(model: nn.Module) -> None:
        unpacked = store_linears(model, base, only)
        kinds = sorted({layer.kind for layer in packed_layers(model).values()})
        odd = f"; {unpacked[0]} and {len(unpacked) - 1} more do not have the widths for it" if unpacked else ""
        which = ", under the adapter alone" if only else ""
        print_line(
            f"weights  packed as {base} when read{which}: {' and '.join(kinds) or 'none'}, the rest as stored{odd}"
        )

    return store


def store_frozen(
    model: nn.Module, base: str, products: str, shapes: Callable[[str], Iterable[tuple[int, int]]]
) -> list[str]:
    """Every adapted linear's and expert's frozen weight becomes of its role's kind; the model has no memory yet.
    Returns the layers that stay plain because their kind does not take their widths.

    shapes(weight's name): of its matrix on every rank, so that all ranks decide alike."""
    unpacked, kinds = [], kinds_of(base)
    for name, layer in model.named_modules():
        if not isinstance(layer, (LoRALinear, LoRAExperts)) or layer.base.weight is None:
            continue
        kind = kinds.get(role_of(name), PLAIN)
        if kind == PLAIN:
            continue
        widths = list(shapes(f"{name}.weight"))
        fitting = (held for held in with_products(kind, products) if all(kind_named(held).fits(*w) for w in widths))
        if (held := next(fitting, None)) is None:
            unpacked.append(name)
        else:
            layer.base.store_as(held)
    return unpacked
