"""From a resolved config to a model ready to train: folder -> model -> LoRA -> recompute -> compile -> optimiser.

Called by recipes/sft.py, evaluate.py and doctor.py; this is where config values meet components.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from erniekit.checkpoint.hub import resolve_model
from erniekit.checkpoint.model_folder import SIDE_FILES, TOKENIZER_FILES, ModelFolder
from erniekit.checkpoint.model_writer import copy_side_files, write_model
from erniekit.config import RunConfig
from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from erniekit.devices import pick
from erniekit.devices.base import Device
from erniekit.log import say
from erniekit.lora.adapter import adapter_of, load_adapter
from erniekit.lora.adapter_files import read_adapter, write_adapter
from erniekit.lora.inject import inject, is_lora_b, lora_state
from erniekit.lora.settings import LoRASettings
from erniekit.models.init import init_weights
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.schedule import Schedule
from erniekit.parallel.recompute import apply_recompute

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Built:
    """A model and what belongs to it. `lora` is None in full fine-tuning."""

    folder: ModelFolder
    model: nn.Module
    device: Device
    dtype: torch.dtype
    lora: LoRASettings | None
    save_format: str
    tokenizer_folder: Path  # whose files go beside the weights: what trained is what serves

    def trainable(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def total(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    # What the saver needs: the weights a checkpoint holds, and both ways of their format.

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return lora_state(self.model) if self.lora else self.model.state_dict()

    def write_weights(self, target: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        if self.lora:
            adapter = adapter_of(self.model, self.lora, tensors, base=str(self.folder.path))
            write_adapter(target, adapter, self.model, self.save_format)
            copy_side_files(self.tokenizer_folder, target, TOKENIZER_FILES)
            return
        copy_side_files(self.folder.path, target, SIDE_FILES)
        copy_side_files(self.tokenizer_folder, target, TOKENIZER_FILES)
        write_model(
            target,
            self.folder.config,
            tensors.__getitem__,
            layout=self.save_format,
        )

    @torch.no_grad()
    def read_weights(self, source: Path) -> None:
        if self.lora:
            load_adapter(self.model, read_adapter(source, self.model))
            return
        saved = ModelFolder(source)
        saved.check_names()
        state = self.model.state_dict()
        for entry in saved.entries():
            if not entry.copy_of:
                state[entry.ours].copy_(saved.read(entry))


def settle(cfg: RunConfig) -> tuple[RunConfig, Device, torch.dtype]:
    """What only this machine can decide: its device, and fp32 where nobody asked for the bf16 a CPU is slow at."""
    device = pick(cfg.train.device, cfg.train.no_cuda)
    if device.type == "cpu" and cfg.precision.compute_type == "bf16" and not cfg.given("compute_type"):
        cfg = cfg.replace(compute_type="fp32")
        say("note     compute_type: bf16 -> fp32 (bf16 is slow on a CPU; write compute_type: bf16 to have it)")
    device.reset_peak()
    torch.manual_seed(cfg.train.seed)
    return cfg, device, DTYPES[cfg.precision.compute_type]


def open_model(cfg: RunConfig) -> tuple[ModelFolder, Tokenizer]:
    path = resolve_model(cfg.model.model_name_or_path, cfg.model.download_hub)
    folder = ModelFolder(path, weights=cfg.model.continue_training)
    return folder, load_tokenizer(cfg.model.tokenizer_name or folder.path)


def lora_settings(cfg: RunConfig) -> LoRASettings | None:
    if not cfg.lora.lora:
        return None
    return LoRASettings.resolve(
        cfg.lora.lora_rank,
        cfg.lora.lora_alpha,
        rslora=cfg.lora.rslora,
        rslora_plus=cfg.lora.rslora_plus,
        lora_plus_scale=cfg.lora.lora_plus_scale,
        targets=cfg.lora.lora_target_modules or None,
        shared_a=cfg.train.compat == "erniekit",
    )


def build(cfg: RunConfig, folder: ModelFolder, device: Device, dtype: torch.dtype) -> Built:
    if cfg.model.continue_training:
        model = folder.build(dtype, device.handle)
    else:
        model = folder.spec.build(folder.config)
        init_weights(model, cfg.train.seed, folder.config.init_std)
        model.to(device=device.handle, dtype=dtype)
    settings = lora_settings(cfg)
    if settings:
        start = read_adapter(Path(cfg.lora.lora_path).expanduser(), model) if cfg.lora.lora_path else None
        if start and not (cfg.given("lora_rank") or cfg.given("lora_alpha") or cfg.given("lora_target_modules")):
            settings = start.settings(model, settings.shared_a)
        inject(model, settings, cfg.train.seed)
        if start:
            load_adapter(model, start)
    for layer in model.layers:  # type: ignore[union-attr]
        layer.attn.inner.backend = cfg.model.attention
    if cfg.memory.recompute:
        apply_recompute(model, cfg.memory.recompute_granularity, cfg.memory.no_recompute_layers)
    tokenizer_folder = Path(cfg.model.tokenizer_name).expanduser() if cfg.model.tokenizer_name else folder.path
    if cfg.model.compile:
        for layer in model.layers:  # type: ignore[union-attr]
            layer.compile()
    return Built(folder, model.train(), device, dtype, settings, cfg.checkpoint.save_format, tokenizer_folder)


def make_optimizer(cfg: RunConfig, built: Built) -> AdamW:
    scale_b = built.lora.lora_plus_scale if built.lora else 1.0
    groups = make_groups(
        built.model,
        cfg.optim.weight_decay,
        cfg.optim.layerwise_lr_decay_bound,
        lambda name: scale_b if is_lora_b(name) else 1.0,
    )
    return AdamW(groups, (cfg.optim.adam_beta1, cfg.optim.adam_beta2), cfg.optim.adam_epsilon)


def make_schedule(cfg: RunConfig, max_steps: int) -> Schedule:
    o = cfg.optim
    return Schedule(
        kind=o.lr_scheduler_type,
        peak=o.learning_rate,
        total_steps=max_steps,
        warmup_steps=o.warmup_steps or int(o.warmup_ratio * max_steps + 0.999999),
        min_lr=o.min_lr,
        num_cycles=o.num_cycles,
        lr_end=o.lr_end,
        power=o.power,
        decay_steps=o.decay_steps,
        steady_steps=_steady_steps(o.lr_scheduler),
        decay_function=o.decay_function,
        compat=cfg.train.compat == "erniekit",
    )


def _steady_steps(lr_scheduler: str | None) -> int | None:
    """`lr_scheduler: wsd:600` holds the peak until step 600."""
    kind, _, steps = (lr_scheduler or "").partition(":")
    return int(steps) if kind == "wsd" and steps else None
