"""How few layers several ranks compute again: as few as each rank's memory allows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distributed.test_reshard import curve, go, place
from erniekit.config import load
from erniekit.devices.base import GIB
from erniekit.devices.cuda import CudaDevice
from erniekit.models import MODELS
from erniekit.parallel.layout import Layout
from erniekit.planner.cards import CARDS, rates_of
from erniekit.planner.device_pool import DevicePool
from erniekit.planner.evaluate import evaluate
from erniekit.recipes import planning, spread_recompute
from support.ranks import Ranks

__all__ = ["place"]
LONG = ("recompute=True", "recompute_granularity=auto", "max_seq_len=131072", "packing=True", "compute_type=bf16")


def decided(
    layout: Layout, *words: str, limits: tuple[float, ...] = (), triton: tuple[bool, ...] = ()
) -> tuple[Any, Any, Any]:
    """The config with what was decided, its job, and the layout's plan within the same memory."""
    asked = [
        "model_name_or_path=ERNIE-4.5-0.3B",
        "train_dataset_path=y",
        "batch_size=1",
        "fine_tuning=Full",
        *LONG,
        *words,
    ]
    cfg = load(asked, "train")
    shape = planning.shape_of(cfg)
    spec = MODELS.get(shape.config.family)
    folder: Any = SimpleNamespace(config=shape.config, spec=spec, path="x")
    rest: Any = {float: limits, bool: triton[1:]}  # of the other ranks
    world: Any = SimpleNamespace(size=layout.size, layout=layout, gather=lambda own: [own, *rest[type(own)]])
    device = CudaDevice("H200", "cuda", 139 * GIB, {torch.bfloat16: 989.4e12})
    if triton and not triton[0]:
        device = device.without({"triton": "another vendor's"})
    made = cfg.derive(*spread_recompute.notes(cfg, device, world, folder, None))
    card = replace(CARDS["h200"], triton=device.triton)
    job = planning.job_of(cfg, shape, cfg.train.gradient_accumulation_steps * layout.data_ranks)
    return made, job, lambda gib: evaluate(job, layout, DevicePool(card, rates_of(card), 8, gib * GIB), exact=True)


@pytest.mark.parametrize("axes", [dict(fsdp=2), dict(dp=2), dict(tp=2, sequence_parallel=True), dict(pp=2), dict(cp=2)])
def test_ranks_compute_as_few_layers_again_as_the_plan_says(axes: dict[str, Any]) -> None:
    made, _, plan = decided(Layout(**axes), "memory_limit=40")
    kept = made.memory.no_recompute_layers
    assert made.memory.recompute_granularity == "full"
    assert tuple(n for n in range(18) if n not in kept) == tuple(sorted(plan(40).again))
    assert 0 < len(kept) < 18
    assert any("of 18 layers" in str(note) for note in made.notes)
    roomy, _, _ = decided(Layout(**axes), "memory_limit=130")
    assert len(roomy.memory.no_recompute_layers) > len(kept)


def test_all_ranks_take_the_decision_of_the_one_with_the_least_memory() -> None:
    tight, _, _ = decided(Layout(dp=2), "memory_limit=40")
    mixed, _, _ = decided(Layout(dp=2), limits=(40.0 * GIB,))
    assert mixed.memory.no_recompute_layers == tight.memory.no_recompute_layers


def test_ranks_of_unlike_devices_decide_alike() -> None:
    """The kernels of one of them need less memory."""
    ours, _, _ = decided(Layout(pp=2), "memory_limit=30", triton=(True, False))
    theirs, _, _ = decided(Layout(pp=2), "memory_limit=30", triton=(False, True))
    alike, _, _ = decided(Layout(pp=2), "memory_limit=30", triton=(True, True))
    assert ours.memory.no_recompute_layers == theirs.memory.no_recompute_layers
    assert len(ours.memory.no_recompute_layers) < len(alike.memory.no_recompute_layers)


def test_what_does_not_fit_even_so_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    made, _, _ = decided(Layout(dp=2), limits=(4.0 * GIB,))
    assert made.memory.no_recompute_layers == ()
    told = capsys.readouterr().err
    assert "with every layer computed again" in told
    assert "4 may be taken" in told


@pytest.mark.parametrize("limit", [4, 1e-6])
def test_a_limit_that_no_rank_can_keep_to_is_told_with_the_weights_and_the_least_that_works(
    limit: float, capsys: pytest.CaptureFixture[str]
) -> None:
    decided(Layout(dp=2), f"memory_limit={limit}")
    told = capsys.readouterr().err
    assert f"memory_limit: {limit:g} (GiB) is too low: weights alone take 0.67 GiB of a rank" in told
    least = re.search(r"the least that works is memory_limit: ([0-9.]+)", told)
    assert least is not None
    decided(Layout(dp=2), f"memory_limit={least[1]}")
    assert "too low" not in capsys.readouterr().err
    decided(Layout(dp=2), f"memory_limit={float(least[1]) - 0.002}")
    assert "too low" in capsys.readouterr().err


@pytest.mark.xdist_group("ranks")
def test_a_run_of_two_ranks_keeps_the_layers_that_fit(ranks: Ranks, place: Path) -> None:
    keys: dict[str, Any] = dict(max_steps=2, save_strategy="no", recompute=True, recompute_granularity="auto")
    plain = go(ranks, place, "fsdp2", "again-all", max_steps=2, save_strategy="no", recompute=True)
    out = go(ranks, place, "fsdp2", "again-none", **keys, memory_limit=8)
    found = {row["key"]: row["value"] for row in json.loads((out / "run.json").read_text())["config"]}
    assert found["no_recompute_layers"] == [0, 1, 2]
    assert curve(out) == pytest.approx(curve(plain), abs=1e-6)
