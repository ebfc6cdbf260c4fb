"""The kernels of one rank's step, alone on the card: communication answers at once, as `erniekit rehearse --rank` has
it. Ranks that share a card take turns on it, and a kernel's time then has the other's turn in it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

from erniekit.bench.profile import profile_steps, steps_for
from erniekit.config import load
from erniekit.devices import pick
from erniekit.devices.base import Device
from erniekit.recipes.rehearsal import Rehearsal, built_for, one_step, prepare
from erniekit.recipes.rehearse_command import layout_on
from erniekit.rehearse.recorded_group import opened

COMPILED = 2  # steps before the recorded ones: the compiler tries its kernels' variants in the first
STEP_S = 0.1  # about what a step takes, of which depends how many run right before those that are recorded


def profiled_slice(folder: Path, ranks: int, rank: int, micro_batches: int, **keys: Any) -> dict[str, Any]:
    """Milliseconds of a step's kernels, as bench/profile.py has them. folder: an empty one."""
    cfg = load([f"{key}={value}" for key, value in keys.items()], "train")
    job = prepare(cfg, layout_on(cfg, ranks), folder, micro_batches)
    device = pick(cfg.train.device, cfg.train.no_cuda)
    try:
        return _profiled(job, rank, device)
    finally:
        torch._dynamo.reset()  # compiled code may still hold the model
        gc.collect()
        device.empty_cache()


def _profiled(job: Rehearsal, rank: int, device: Device) -> dict[str, Any]:
    with opened(rank, job.layout.size):
        ready = built_for(job, rank, device)
        for _ in range(COMPILED):
            one_step(ready, job.micro_batches)
        device.synchronise()
        ahead, count = steps_for(STEP_S, device.type != "cpu")
        return profile_steps(lambda number: one_step(ready, job.micro_batches), 0, ahead, count, device)
