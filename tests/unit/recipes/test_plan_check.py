"""A plan against what a run measured, and what a user reads when memory runs out."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from erniekit.config import RunConfig, load
from erniekit.demo.tiny import make_tiny_model
from erniekit.devices.cuda import CudaDevice
from erniekit.errors import DeviceError
from erniekit.parallel.layout import Layout
from erniekit.planner.cards import CARDS, rates_of
from erniekit.planner.device_pool import DevicePool
from erniekit.planner.evaluate import evaluate
from erniekit.planner.job import Job
from erniekit.planner.memory import GIB
from erniekit.recipes import plan_check, stage_of, training
from erniekit.recipes.planning import job_of, shape_of
from erniekit.recipes.run_plan import plan_run
from erniekit.train.metrics import StepStatistics
from support.planned_recipe import RECIPE

USUAL = StepStatistics(5e3, 60.0, 20.0, 0.5)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(RECIPE)
    return file


def card(gib: float = 139.8) -> Any:
    class Full(CudaDevice):
        def peak_allocated(self) -> int:
            return int(0.97 * gib * GIB)

        def capability(self) -> None:
            return None

    return Full("NVIDIA H200", "cuda", int(gib * GIB))


def job(recipe: Path, *words: str) -> Job:
    cfg = load([str(recipe), "gradient_accumulation_steps=1", *words], "train")
    return job_of(cfg, shape_of(cfg), 1)


def test_the_line_at_the_end_compares_memory_and_speed() -> None:
    line = plan_check.comparison(12 * GIB, 10 * GIB, 110e3, 100e3)
    assert line == "memory 12.0 GiB planned, 10.0 at the most (+20%); 110,000 tokens/s planned, 100,000 measured (+10%)"
    assert plan_check.comparison(12 * GIB, 10 * GIB, 0.0, 100e3) == "memory 12.0 GiB planned, 10.0 at the most (+20%)"


def test_short_documents_of_a_pack_are_planned_as_fast_as_a_card_ran_them(recipe: Path) -> None:
    """`bench --real`, case sft-packed on one H200: 32K packs of documents of 1K, 201k to 208k tokens/s."""
    packs, here = (
        job(recipe, "max_seq_len=32768", "fine_tuning=Full"),
        DevicePool(CARDS["h200"], rates_of(CARDS["h200"]), 1),
    )
    own = plan_check.as_it_was(packs, Layout(), StepStatistics(205e3, 32_200, 1_108, 0.98))
    assert (own.length, own.document) == (32_200, 1_108)
    assert evaluate(own, Layout(), here, exact=True).tokens == pytest.approx(205e3, rel=0.1)
    assert evaluate(packs, Layout(), here, exact=True).tokens < 100e3, "as one document it is another run"


def test_rows_keep_a_length_that_the_layout_can_cut(recipe: Path) -> None:
    layout = Layout(tp=4, sequence_parallel=True)
    own = plan_check.as_it_was(job(recipe), layout, StepStatistics(1.0, 6_001.5, 6_100, 1.0))
    assert own.length == 6_004


def test_the_host_launches_nothing_of_layers_that_are_replayed(recipe: Path) -> None:
    short, here = job(recipe, "max_seq_len=512"), DevicePool(CARDS["h200"], rates_of(CARDS["h200"]), 1)
    launched, replayed = (
        evaluate(replace(short, replayed=one), Layout(), here, exact=True).tokens for one in (False, True)
    )
    assert replayed > 2 * launched


def test_out_of_memory_names_what_was_there_and_one_change_that_fits(recipe: Path) -> None:
    long = load([str(recipe), "gradient_accumulation_steps=1", "max_seq_len=131072"], "train")
    error = plan_check.out_of_memory(long, card(60))
    what, where, fix = error.lines()
    assert "NVIDIA H200 has 60 GiB" in what
    assert "58 GiB were allocated" in what
    assert "activations" in where
    assert fix.startswith("fix:   set recompute: True")
    whole = load([str(recipe), "model_name_or_path=ERNIE-4.5-21B-A3B"], "train")
    assert "no single key does" in plan_check.out_of_memory(whole, card()).fix
    strange = load([str(recipe), "model_name_or_path=unknown"], "train")
    assert "recompute: True" in plan_check.out_of_memory(strange, card()).fix


def test_nothing_is_compared_where_the_device_does_not_count() -> None:
    plan: Any = SimpleNamespace(device=SimpleNamespace(counts_memory=False))
    assert plan_check.line_of(plan, USUAL) is None


@pytest.fixture
def tiny_run(tmp_path: Path) -> RunConfig:
    model = tmp_path / "model"
    make_tiny_model(model)
    return load([
        f"model_name_or_path={model}", "device=cpu", "compute_type=fp32", "max_seq_len=64",
        f"train_dataset_path={tmp_path / 'rows.jsonl'}", f"output_dir={tmp_path / 'out'}",
    ])  # fmt: skip


def test_a_decided_run_is_compared_with_its_own_plan(tiny_run: RunConfig) -> None:
    plan = plan_run(tiny_run, one_process=True)
    assert plan_check.line_of(plan, USUAL) is None, "a CPU counts no peak"
    line = plan_check.line_of(replace(plan, device=card(1.0)), USUAL)
    assert line is not None
    assert re.fullmatch(
        r"memory 0\.5 GiB planned, 1\.0 at the most \(-\d+%\); [\d,]+ tokens/s planned, 5,000 measured \([+-]\d+%\)",
        line,
    )


def test_a_run_that_runs_out_of_memory_ends_with_what_was_planned(
    tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(training, "run", full)
    monkeypatch.setattr(training, "pick", lambda *_: card(0.4))
    with pytest.raises(DeviceError) as caught:
        training.train(stage_of(tiny_run), tiny_run)
    what, where, fix = caught.value.lines()
    assert "NVIDIA H200 has 0 GiB, and this run needs more: 0 GiB were allocated" in what
    assert "planned" in where
    assert "one device" in where
    assert fix.removeprefix("fix:").strip()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
