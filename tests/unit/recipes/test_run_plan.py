"""What only this machine can decide of a run, and how it is recorded."""

from __future__ import annotations

import pytest
import torch

from erniekit.config import load
from erniekit.devices import cpu
from erniekit.recipes import run_plan


@pytest.mark.parametrize("word", ["device=auto", "device=cpu", "bf16=True"])
def test_a_run_that_finds_itself_on_a_cpu_records_fp32_with_its_reason(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_plan, "pick", lambda *asked: cpu.make())
    opened = run_plan.open_device(load([word]))
    cfg, dtype = opened.config, opened.dtype
    assert dtype == torch.float32
    assert {key: (cfg[key], cfg.origin(key)) for key in ("compute_type", "bf16")} == {
        "compute_type": ("fp32", "derived"),
        "bf16": (False, "derived"),
    }
    (note,) = [str(n) for n in cfg.notes if n.key == "compute_type"]
    assert note == "compute_type: bf16 -> fp32 (bf16 is slow on a CPU; write compute_type: bf16 to have it)"


def test_bf16_that_was_asked_for_stays_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_plan, "pick", lambda *asked: cpu.make())
    opened = run_plan.open_device(load(["compute_type=bf16"]))
    cfg, dtype = opened.config, opened.dtype
    assert dtype == torch.bfloat16
    assert (cfg.origin("compute_type"), cfg.precision.bf16) == ("key=value", True)
