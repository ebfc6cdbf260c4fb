"""`erniekit train` with an optimiser that keeps fewer bytes of a weight: its curve beside fp32 AdamW's, and a stop in
the middle that changes no bit."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import ConfigError, Preempted
from erniekit.train.metrics import LogHook
from support.plain_adamw import results_come_late

# Each choice, and what a checkpoint then holds of a weight.
MODES: dict[str, dict[str, Any]] = {
    "exact16": dict(master_weights="exact16"),
    "bf16": dict(optim_states="bf16"),
    "8bit": dict(optim_states="8bit"),
    "none": dict(master_weights="none"),
    "exact16 8bit in backward": dict(master_weights="exact16", optim_states="8bit", update_in_backward=True),
    "none 8bit in backward": dict(master_weights="none", optim_states="8bit", update_in_backward=True),
    "in backward, each tensor clipped": dict(update_in_backward=True, grad_clip="tensor"),
}
STEPS = 20
FEW = ("exact16 8bit in backward", "none 8bit in backward")  # at every commit; the others in the full suite


def each(*few: str) -> list[Any]:
    return [pytest.param(name, marks=[] if name in few else [pytest.mark.full]) for name in MODES]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("moe"), family="ernie4_5_moe")


@pytest.fixture
def go(moe: Path, train: Callable) -> Callable:
    def run(output: Path, **keys: Any) -> list[float]:
        fixed = dict(model_name_or_path=moe, compute_type="bf16", gradient_accumulation_steps=1, doctor="off")
        train(output, **{**fixed, "max_steps": STEPS, "weight_decay": 0.1, **keys})
        return curve(output)

    return run


def curve(output: Path) -> list[float]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in lines if "loss" in record]


def largest_gap(one: list[float], other: list[float]) -> float:
    """Of the means over ten steps each: a step's own loss is that of its few rows."""
    means = [[sum(c[k : k + 10]) / 10 for k in range(0, len(c), 10)] for c in (one, other)]
    return max(abs(a / b - 1) for a, b in zip(*means))


@pytest.mark.parametrize("mode", each(*FEW))
def test_twenty_steps_stay_within_half_a_percent_of_fp32_adamw(mode: str, go: Callable, tmp_path: Path) -> None:
    wide = go(tmp_path / "wide", max_steps=STEPS)
    assert largest_gap(go(tmp_path / "lean", **MODES[mode]), wide) < 0.005
    assert wide[-1] < wide[0] - 0.1, "it learns"
