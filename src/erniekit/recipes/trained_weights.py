"""Which weights a run trains: by stage and model, by `freeze_config`, and by the patterns of `train_only` and `freeze`.

Called by run_plan.py (mistyped patterns are refused before data is read), build.py, planning.py, memory_decisions.py
and run_summary.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from erniekit.config import RunConfig
from erniekit.models import MODELS
from erniekit.models.config import DecoderConfig
from erniekit.models.trained_names import set_trained
from erniekit.models.vision_parts import freeze
from erniekit.optim.muon_names import by_muon
from erniekit.printable import counted
from erniekit.recipes.expert_settings import mtp_tokens


def choose(cfg: RunConfig, model: Any) -> None:
    """Before adapters are put in: they freeze all the rest."""
    set_mtp(cfg, model)
    freeze(model, cfg.vision.freeze_config)
    if not cfg.lora.lora:
        set_trained(model, cfg.tuning.train_only, cfg.tuning.freeze)


def set_mtp(cfg: RunConfig, model: Any) -> None:
    """MTP layers are trained with their loss weight, or frozen and saved unchanged."""
    if not model.config.mtp_layers:
        return
    trained = mtp_tokens(cfg, model.config) > 0
    model.mtp_weight = cfg.model.multi_token_pred_lambda if trained else 0.0
    model.mtp.requires_grad_(trained)


def share(cfg: RunConfig, config: DecoderConfig) -> float:
    """Of the model's weights, how many the patterns leave to train."""
    with torch.device("meta"):
        model = MODELS.get(config.family).build(config)
    choose(cfg, model)
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, on in counts if on) / sum(n for n, _ in counts)


def muon_share(cfg: RunConfig, config: DecoderConfig) -> float:
    """Of the trained weights, how many Muon updates."""
    with torch.device("meta"):
        model = MODELS.get(config.family).build(config)
    choose(cfg, model)
    counts = [(p.numel(), by_muon(n, p.shape)) for n, p in model.named_parameters() if p.requires_grad]
    return sum(n for n, on in counts if on) / max(1, sum(n for n, _ in counts))


def described(cfg: RunConfig, model: nn.Module) -> str:
    """For the first lines of a run."""
    params = list(model.parameters())
    trained = [p for p in params if p.requires_grad]
    count, total = sum(p.numel() for p in trained), sum(p.numel() for p in params)
    keys = " and ".join(
        f"{key}: {','.join(given)}"
        for key, given in (("train_only", cfg.tuning.train_only), ("freeze", cfg.tuning.freeze))
        if given
    )
    tensors = f"{len(trained)} of {counted(len(params), 'tensor')}"
    return f"{count:,} of {total:,} weights ({count / total:.1%}), {tensors} ({keys})"
