"""The model FLOPs of a workload's step, the same for every program that computes it. Called by worker.py.

A peer gains nothing by computing more than the data needs, nor by adapting fewer projections than ours.
"""

from __future__ import annotations

from erniekit.config import RunConfig
from erniekit.data.types import Batch
from erniekit.models.config import DecoderConfig
from erniekit.models.costs import TokenCounts, adapters_met, step_flops
from erniekit.models.layers.vision_language import TOWER
from erniekit.train.metrics import VisionTraining


def useful_flops(cfg: RunConfig, c: DecoderConfig, batch: Batch) -> float:
    """Of the decoder, each bank of experts with its own tokens; and of the tower and resampler, where there are
    pictures."""
    vision = batch.shown().vision_tokens
    counts = TokenCounts(batch.num_tokens, batch.num_label_tokens, batch.sum_squares, vision)
    lora, live = cfg.lora.lora, cfg.train.stage == "DPO" and cfg.dpo.reference_logps != "cached"
    text = batch.num_tokens - vision
    rank = cfg.lora.lora_rank
    met = text * adapters_met(c, rank) + (vision * adapters_met(c, rank, vision=True) if vision else 0) if lora else 0
    adapters = met / batch.num_tokens
    return step_flops(c, counts, frozen_base=lora, adapters=adapters, live_reference=live) + _looking(cfg, c, batch)


def _looking(cfg: RunConfig, c: DecoderConfig, batch: Batch) -> float:
    if batch.vision is None:
        return 0.0
    full, frozen = not cfg.lora.lora, cfg.vision.freeze_config
    tower, resampler = (full and name not in frozen for name in ("freeze_vision", "freeze_resampler"))
    shown = batch.shown()
    if cfg.vision.vision_feature_cache == "on":  # no picture is looked at, whatever `batch` holds
        shown = shown._replace(encoded_patches=0, encoded_features=0, squares=0)
    return VisionTraining(tower, resampler, adapted=cfg.lora.lora, kept=TOWER).flops(c, shown)
