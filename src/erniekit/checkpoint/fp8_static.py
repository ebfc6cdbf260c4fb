"""Model folders in static FP8: their stored scales put into the model that is built from them.

Used by model_folder.py and by code that fills layers one at a time. With the scales in place every product is the one
an FP8 engine computes (kernels/stored/fp8_static.py); where fused parts have different scales, by the largest, as vLLM
does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from erniekit.checkpoint.quantised import StoredWeight
from erniekit.errors import CheckpointError
from erniekit.kernels.stored.fp8_static import StaticFormat
from erniekit.model_contract import bare
from erniekit.models.layers.experts import ExpertLinear
from erniekit.models.layers.rounding import StaticRounding
from erniekit.models.names import Entry


class ScaledFolder(Protocol):
    """What is asked of a model folder."""

    @property
    def path(self) -> Path: ...

    @property
    def quantised(self) -> Mapping[str, StoredWeight]:
        """By the names of the weights that are stored so."""

    def entries(self) -> list[Entry]: ...

    def stored_tensor(self, name: str) -> torch.Tensor:
        """By the name it has in the files."""


def install_scales(model: nn.Module, folder: ScaledFolder, prefix: str = "") -> None:
    """Of all layers, or of those under `prefix`; their weights have memory already."""
    for entry in folder.entries():
        stored = [folder.quantised.get(name) for name in entry.theirs]
        if not entry.ours.startswith(prefix) or any(each is None or not each.scheme.static_inputs for each in stored):
            continue
        layer = bare(model.get_submodule(entry.ours.removesuffix(".weight")))
        modules = [each.module for each in stored if each is not None]
        block = max(each.block for each in stored if each is not None)
        experts = layer.experts if isinstance(layer, ExpertLinear) else 1
        rounding = StaticRounding(StaticFormat(block))
        rounding.give_memory(experts, layer.weight.device)
        weights = _read(folder, modules, "weight_scale").view(experts, -1)
        rounding.weight_scale.copy_(weights.amax(1))
        rounding.input_scale.copy_(_read(folder, modules, "input_scale").amax())
        layer.rounding = rounding.train(layer.training)


def _read(folder: ScaledFolder, modules: list[str], what: str) -> torch.Tensor:
    """fp32, one for each."""
    found = torch.cat([folder.stored_tensor(f"{module}.{what}").float().reshape(-1)[:1] for module in modules])
    if len(found) < len(modules) or not (torch.isfinite(found) & (found >= 0)).all():
        raise CheckpointError(
            f"{what} of {modules[0]}, or of what is fused with it, is not a scale",
            where=str(folder.path),
            fix="download the model again, or quantise it again",
        )
    return found
