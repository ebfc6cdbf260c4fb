"""A workload as the keys of a user's recipe. Called by ours.py and planned.py; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from erniekit.bench.workloads import Workload

LEARNING_RATE = 1e-5


def run_keys(
    work: Workload, folder: Path, compute: str, more: Mapping[str, Any], device: str = "", seed: int = 0
) -> dict[str, Any]:
    """What the workload names, and defaults for the rest. folder: holds config.json. more: over the workload's keys."""
    rows = work.rows
    return {
        "model_name_or_path": folder,
        "continue_training": False,  # random weights of the real shape
        "max_seq_len": rows.length,
        "batch_size": rows.count,
        "gradient_accumulation_steps": 1,
        "compute_type": compute,
        **({"device": device} if device else {}),
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "seed": seed,
        **work.keys,
        **more,
    }
