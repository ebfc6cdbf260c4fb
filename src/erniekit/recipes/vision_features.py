"""The feature cache of a run whose vision tower is frozen: whether it is on, whose features it keeps, and what computes
those that are missing. VisionStage makes it before the first step (data/vision/features.py keeps the files).

The tower gets each picture by itself, with the cache and without it, so that its features are the same bits either way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from erniekit.config import RunConfig
from erniekit.data.types import Batch
from erniekit.data.vision.collate import VisionCollate
from erniekit.data.vision.features import FOLDER, FeatureShape, FeatureStore, free_space
from erniekit.errors import ConfigError
from erniekit.files.cache_folder import default_cache_dir
from erniekit.log import emit, warn_once
from erniekit.model_contract import PictureTower, choose_kernels, picture_tower, spread
from erniekit.models.costs import adapters_met_of
from erniekit.models.layers.linear import HoldsWeight
from erniekit.models.layers.vision_language import TOKENS, TOWER
from erniekit.models.vision_parts import part_of
from erniekit.parallel.compiled import compile_row_functions
from erniekit.parallel.memory import give_memory
from erniekit.recipes.built import Built
from erniekit.recipes.datasets import TrainData
from erniekit.train.metrics import VisionTraining

GB = 10**9
VERSION = 1  # of how features are computed: raise it when the same weights and pixels would give others


@dataclass(frozen=True)
class FeatureEncoder:
    """What computes features: the run's own tower, or a copy of it where the run's is spread over ranks."""

    tower: Any
    resampler: Any | None  # None: it is trained, so that what is kept ends before it

    @property
    def parts(self) -> list[nn.Module]:
        return [self.tower, *([self.resampler] if self.resampler is not None else [])]

    @torch.no_grad()
    def encode(self, pixels: torch.Tensor, grid: tuple[int, int, int], device: torch.device) -> torch.Tensor:
        seen: torch.Tensor = self.tower(pixels.to(device), [grid])
        return seen if self.resampler is None else self.resampler(seen, [grid])

    def digest(self) -> str:
        out = hashlib.blake2b(digest_size=16)
        for part in self.parts:
            for name, tensor in sorted(part.state_dict().items()):
                raw = tensor.detach().contiguous().view(torch.uint8).cpu().numpy()
                out.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                out.update(raw)
        return out.hexdigest()


class KeptFeatures:
    """A stage's `prepare`: before a step, features of pictures that have none are computed, used and kept."""

    def __init__(self, encoder: FeatureEncoder, store: FeatureStore, device: torch.device, summary: str) -> None:
        self.encoder, self.store, self.device, self.summary = encoder, store, device, summary

    def __call__(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        return [self.seen(batch) for batch in batches]

    def seen(self, batch: Batch) -> Batch:
        vision = batch.vision
        if vision is None or not vision.unseen:
            return batch
        rows = vision.patches
        for one in vision.unseen:
            features = self.encoder.encode(one.pixels, one.grid, self.device)
            laid_out = self.store.shape.laid_out(features, one.grid)
            rows[one.start : one.start + laid_out.shape[0]] = laid_out.to(rows.device)
            if one.medium is not None:
                self.store.write(one.medium, features.cpu())
        if self.store.damaged:
            warn_once("the feature cache had damaged files: those pictures were computed again")
        return replace(batch, vision=vision._replace(patches=rows, unseen=()))

    def metrics(self) -> dict[str, float]:
        return self.store.counts()


def feature_cache(cfg: RunConfig, built: Built, data: TrainData) -> KeptFeatures | None:
    """Installed where the keys and the run allow it; prints which. All ranks call it."""
    frozen = _frozen_parts(built)
    if "tower" in frozen:
        for tower in _picture_towers(built):
            tower.tower.alone, tower.resampler.alone = True, "resampler" in frozen
    mode = cfg.vision.vision_feature_cache
    if mode == "off":
        return None
    reason = _why_not(cfg, built, frozen)
    collate = data.collate
    assert isinstance(collate, VisionCollate)
    shape = _shape(built, "resampler" in frozen)
    sources = [*data.sources, *data.evaluation]
    patches = sum(int(source.patches.sum()) for source in sources if source.patches is not None)
    needed = patches * shape.row_width * shape.dtype.itemsize
    limit = int(cfg.vision.vision_feature_cache_gb * GB)
    if not reason and mode == "auto" and needed > limit:
        reason = f"features of all would take {_gb(needed)}, vision_feature_cache_gb is {limit / GB:g}"
    if reason:
        if mode == "on":
            raise _impossible(reason)
        if "tower" in frozen:
            _print_computed(reason)
        return None
    if not patches:  # text alone
        return None
    encoder = (
        _encoder(built, "resampler" in frozen) if _picture_towers(built) else None
    )  # later pipeline stages have no tower
    name = built.world.broadcast(_name(built, encoder, shape) if encoder is not None else "")  # the first rank's
    folder = Path(cfg.data.cache_dir or default_cache_dir()).expanduser() / FOLDER
    capacity = free_space(folder, limit, needed, name) if built.world.is_main else 0
    capacity = built.world.broadcast(capacity) // built.world.size
    what = "the resampler's" if shape.tokens else "the tower's"
    summary = f"{what} output of all pictures, {_gb(needed)} at most, in {folder / name}"
    emit(f"features {summary}: a picture is decoded and computed once (vision_feature_cache)")
    if needed > limit:
        emit(f"note     vision_feature_cache_gb is {limit / GB:g}: pictures beyond it are computed in every step")
    if encoder is None:
        return None
    collate.store = FeatureStore(folder / name, shape, capacity)
    for tower in _picture_towers(built):
        tower.kept = TOKENS if shape.tokens else TOWER
    return KeptFeatures(encoder, collate.store, built.device.handle, f"vision_feature_cache: {summary}")


def seen_before(built: Built, batch: Batch) -> Batch:
    """A batch as the cache gives it from the second time on: features in the place of pixels. For `erniekit bench`."""
    vision, frozen = batch.vision, _frozen_parts(built)
    assert vision is not None
    assert "tower" in frozen
    shape, encoder = _shape(built, "resampler" in frozen), _encoder(built, "resampler" in frozen)
    for tower in _picture_towers(built):
        tower.kept = TOKENS if shape.tokens else TOWER
    grids = [(int(t), int(h), int(w)) for t, h, w in vision.grids.tolist()]
    rows = []
    for pixels, grid in zip(vision.patches.split([t * h * w for t, h, w in grids]), grids):
        rows.append(shape.laid_out(encoder.encode(pixels, grid, built.device.handle), grid).cpu())
    return replace(batch, vision=vision._replace(patches=torch.cat(rows)))


def vision_training(built: Built, kept: Any) -> VisionTraining | None:
    """How tower and resampler are trained, for FLOPs; None: a text model. kept: a run's `prepare`."""
    config = built.folder.config
    if config.vision is None:
        return None
    trained = [(part_of(n), "lora" in n.split(".")) for n, p in built.whole.named_parameters() if p.requires_grad]
    sizes = ((name, p.numel()) for name, p in built.whole.named_parameters())
    what = "" if not isinstance(kept, KeptFeatures) else TOKENS if kept.store.shape.tokens else TOWER
    return VisionTraining(
        tower_trained=any(part == "tower" for part, _ in trained),
        resampler_trained=("resampler", False) in trained,
        adapted=("resampler", True) in trained,
        adapters=adapters_met_of(config, sizes, vision=True),
        kept=what,
    )


def no_feature_cache(cfg: RunConfig, built: Built, reason: str) -> None:
    """For a stage that keeps none: printed where the tower is frozen, refused where the keys request it."""
    if cfg.vision.vision_feature_cache == "on":
        raise _impossible(reason)
    if cfg.vision.vision_feature_cache == "auto" and "tower" in _frozen_parts(built):
        _print_computed(reason)


def _impossible(reason: str) -> ConfigError:
    return ConfigError(
        f"no feature cache is possible here: {reason}",
        where="vision_feature_cache: on",
        fix="freeze_config: freeze_vision keeps the tower as it is in VL-SFT; or leave vision_feature_cache out",
    )


def _print_computed(reason: str) -> None:
    emit(f"note     pictures go through the tower in every step: {reason} (vision_feature_cache)")


def _gb(count: int) -> str:
    return f"{count / GB:,.2g} GB"


def _picture_towers(built: Built) -> list[PictureTower]:
    """That of the part of the model which is the first stage, if that is here."""
    found = (picture_tower(part) for part in built.engine.parts if spread(part).first)
    return [tower for tower in found if tower is not None]


def _frozen_parts(built: Built) -> set[str]:
    """tower and resampler, as far as no weight or adapter of theirs is trained."""
    trained = {part_of(name) for name, p in built.whole.named_parameters() if p.requires_grad}
    return {"tower", "resampler"} - trained


def _why_not(cfg: RunConfig, built: Built, frozen: set[str]) -> str:
    """Empty: there is no reason against it."""
    if "tower" not in frozen:
        return "the tower is trained"
    first = [part for part in built.engine.parts if spread(part).first]
    parts = [m for part in first for name, m in part.named_modules() if part_of(name) in frozen]
    if any(isinstance(m, HoldsWeight) and (m.packed_shape is not None or m.rounding is not None) for m in parts):
        return "the tower's weights are rounded in this run"
    if built.world.layout.fsdp > 1 and not cfg.model.continue_training:
        return "random weights are spread over the ranks"
    return ""


def _shape(built: Built, tokens: bool) -> FeatureShape:
    config = built.folder.config
    v = config.vision
    assert v is not None
    width = config.hidden_size if tokens else v.width
    return FeatureShape(width, built.dtype, tokens, v.merge)


def _encoder(built: Built, with_resampler: bool) -> FeatureEncoder:
    if built.world.layout.fsdp == 1:
        pictures = _picture_towers(built)[0]
    else:
        pictures = _copy(built, with_resampler)
    return FeatureEncoder(pictures.tower, pictures.resampler if with_resampler else None)


def _copy(built: Built, with_resampler: bool) -> PictureTower:
    """Tower and resampler of the model's folder, whole: as the run's are gathered."""
    folder, device = built.folder, built.device
    model: Any = folder.spec.cast(folder.meta(), built.dtype)
    entries = {entry.ours: entry for entry in folder.entries() if not entry.copy_of}
    names = ["tower", *(["resampler"] if with_resampler else [])]
    for name in names:
        part: Any = model.get_submodule(name)
        part.alone = True
        give_memory(part, device.handle)
        part.requires_grad_(False)
        if device.triton:
            choose_kernels(part, device.handle)
        with torch.no_grad():
            for inner, slot in part.named_parameters():
                slot.copy_(folder.read(entries[f"{name}.{inner}"]))
        if built.plan.config.model.compile:  # as the run's are: the same bits
            compile_row_functions(part)
    pictures = picture_tower(model)
    assert pictures is not None
    return pictures


def _name(built: Built, encoder: FeatureEncoder, shape: FeatureShape) -> str:
    """Of all that features depend on besides the pixels: weights, sizes, and what computes, as bits depend on that."""
    v = built.folder.config.vision
    how = bool(built.plan.config.model.compile), torch.are_deterministic_algorithms_enabled()
    summary = (
        VERSION,
        encoder.digest(),
        repr(v),
        repr(shape),
        built.device.name,
        torch.__version__,
        _threads(built),
        how,
    )
    return hashlib.blake2b(repr(summary).encode(), digest_size=16).hexdigest()


def _threads(built: Built) -> int:
    """A CPU divides sums among its threads."""
    return torch.get_num_threads() if built.device.type == "cpu" else 0
