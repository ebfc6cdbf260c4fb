"""What a logged step is made of: the numbers others tell beside the loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from erniekit.devices.cpu import make
from erniekit.models.config import DecoderConfig, MoEShape
from erniekit.train.metrics import LogHook
from erniekit.train.step import StepResult

# ERNIE-4.5-21B-A3B
SPARSE = DecoderConfig(
    family="ernie4_5_moe", vocab_size=103424, hidden_size=2560, intermediate_size=12288, num_layers=28, num_heads=20,
    num_kv_heads=4, head_dim=128, rms_norm_eps=1e-5, rope_theta=5e5, rope_style="pairs", tie_word_embeddings=True,
    max_positions=131072, mtp_layers=1, moe=MoEShape(64, 6, 1536, 3072, start=1, end=27),
)  # fmt: skip


def result(step: int, **extras: float) -> StepResult:
    return StepResult(step, 2.0, 1.0, 1e-3, 10, 5, 100, True, extras)


def test_numbers_told_beside_the_loss_are_logged_as_means_since_the_last_record() -> None:
    logged: list[dict[str, Any]] = []
    trackers = SimpleNamespace(
        log=lambda step, record, kind: logged.append(record), start=lambda **k: None, advance=lambda step: None
    )
    trainer = SimpleNamespace(max_steps=4, state=SimpleNamespace(step=0, packs=4))
    hook = LogHook(trackers, make(), SPARSE, torch.float32, 2, 1, 10, False, also=lambda: {"moe_load": 1.5})  # type: ignore[arg-type]
    hook.on_start(trainer)  # type: ignore[arg-type]
    for step, told in ((1, 1.0), (2, 3.0), (3, 5.0), (4, 7.0)):
        hook.after_step(trainer, result(step, router_aux=told))  # type: ignore[arg-type]
    assert [r["router_aux"] for r in logged] == [pytest.approx(2.0), pytest.approx(6.0)]
    assert [r["moe_load"] for r in logged] == [1.5, 1.5]
    assert [r["loss"] for r in logged] == [2.0, 2.0]
