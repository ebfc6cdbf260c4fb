"""The model FLOPs of a workload's step, the same for every program that computes it. Called by worker.py.

A peer gains nothing by computing more than the data asks for, nor by adapting fewer projections than ours.
"""

from __future__ import annotations

from erniekit.config import RunConfig
from erniekit.data.types import Batch
from erniekit.models.config import DecoderConfig
from erniekit.models.costs import Seen, adapters_met, step_flops


def useful_flops(cfg: RunConfig, c: DecoderConfig, batch: Batch) -> float:
    seen = Seen(batch.num_tokens, batch.num_label_tokens, batch.sum_squares)
    lora, live = cfg.lora.lora, cfg.train.stage == "DPO" and cfg.dpo.reference_logps != "cached"
    adapters = adapters_met(c, cfg.lora.lora_rank) if lora else 0
    return step_flops(c, seen, frozen_base=lora, adapters=adapters, live_reference=live)
