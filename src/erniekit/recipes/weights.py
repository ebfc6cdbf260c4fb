"""Where a model's first or saved values come from, written piece by piece into whatever part of it a rank holds.

Used by recipes/build.py to start and to resume; files are read in slices, random values are drawn whole and cut.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.slices import fill_boxes
from erniekit.lora.adapter import Adapter, load_adapter
from erniekit.lora.inject import is_lora, lora_linears, lora_state, reset_lora
from erniekit.lora.start_values import start_from_weights
from erniekit.models.init import initial_value
from erniekit.models.score_head import WEIGHT
from erniekit.parallel.memory import give_memory
from erniekit.parallel.sharding import Sharding

WeightOf = Callable[[str], torch.Tensor]  # a whole weight by our name
Fill = Callable[[str, torch.Tensor], None]  # (name, this rank's piece of it)


def from_whole(values: Mapping[str, torch.Tensor], sharding: Sharding, rank: int) -> Fill:
    def fill(name: str, piece: torch.Tensor) -> None:
        for box in sharding.boxes(name, rank):
            piece[box.local_slices].copy_(values[name][box.global_slices])

    return fill


def from_folder(folder: ModelFolder, sharding: Sharding, rank: int, seed: int = 0) -> Fill:
    """Only the bytes this rank holds are read; a score head that the files lack is drawn by seed."""
    folder.check_names()
    folder.check_shapes(folder.meta())
    entries = {entry.ours: entry for entry in folder.entries() if not entry.copy_of}
    files = folder.slices()
    drawn = from_nothing(sharding, rank, seed, folder.config.init_std)

    def fill(name: str, piece: torch.Tensor) -> None:
        if folder.new_head and name == WEIGHT:
            return drawn(name, piece)
        fill_boxes(files, entries[name], sharding.boxes(name, rank), piece)

    return fill


def from_nothing(sharding: Sharding, rank: int, seed: int, std: float) -> Fill:
    """Random weights, the same whatever the layout: each tensor is drawn whole, by its name."""

    def fill(name: str, piece: torch.Tensor) -> None:
        whole = initial_value(name, sharding.shape(name), seed, std, piece.device)
        for box in sharding.boxes(name, rank):
            piece[box.local_slices].copy_(whole[box.global_slices])

    return fill


def base_and_adapters(base: Fill, adapters: Fill, held: Collection[str]) -> Fill:
    """held: names whose values `adapters` has; a score head is among them where an earlier run trained it."""

    def fill(name: str, piece: torch.Tensor) -> None:
        (adapters if name in held else base)(name, piece)

    return fill


def rounded(fill: Fill, dtypes: Mapping[str, torch.dtype]) -> Fill:
    """Weights kept in fp32 that are computed with in another dtype start as numbers of that dtype: as the masters of
    16-bit weights do, so that a run is the same one whether it is sharded or not."""

    def fill_rounded(name: str, piece: torch.Tensor) -> None:
        fill(name, piece)
        if dtypes[name] != piece.dtype:
            piece.copy_(piece.to(dtypes[name]))

    return fill_rounded


def whole_adapters(
    model: nn.Module, seed: int, adapter: Adapter | None, weight_of: WeightOf | None = None, iterations: int = 0
) -> dict[str, torch.Tensor]:
    """All adapters' starting values; they are small, so every rank makes them whole. The model is left on meta.
    weight_of: for those that begin as a part of the weights below them; iterations: as start_from_weights has it."""
    for _, module in lora_linears(model):
        give_memory(module.lora, torch.device("cpu"))
    reset_lora(model, seed)
    if adapter is not None:
        load_adapter(model, adapter)
    elif weight_of is not None:
        start_from_weights(model, weight_of, seed, iterations)
    values = {name: t.detach() for name, t in lora_state(model).items() if is_lora(name)}  # keeps the memory
    if adapter is not None and adapter.head is not None:
        values[WEIGHT] = adapter.head
    for _, module in lora_linears(model):
        module.lora.to("meta")
    return values


def saved(folder: Path, whole: nn.Module, sharding: Sharding, rank: int, lora: bool, seed: int) -> Fill:
    """A checkpoint's weights: the adapters, or the whole model. Its files have been compared by who chose it."""
    if lora:
        from erniekit.lora.adapter_files import read_adapter

        values = whole_adapters(whole, seed, read_adapter(folder, whole, verify="size"))
        return from_whole(values, sharding, rank)
    return from_folder(ModelFolder(folder, verify="size"), sharding, rank)
