"""Whole DPO runs recorded from ERNIEKit on Paddle, all weights and LoRA: from their micro-batches, and from their rows.

The table of loss types and the curves without a trainer are in tests/unit/losses/test_dpo_paddle.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.data.types import Batch
from erniekit.devices import pick
from erniekit.losses.dpo import DpoSettings, dpo_loss, metric_names, pair_log_probs
from erniekit.parallel.engine import Engine
from erniekit.parallel.mesh import World
from erniekit.parallel.step_metrics import StepMetrics
from support.recorded import recorded_run, train_from_rows
from support.recorded_training import pair_batch, recorded_step, with_adapter

CURVE = 1e-4  # fp32 on another BLAS: the fixtures' own cross-check differs by 3e-6 to 6e-6
LOGPS = 2e-3  # sums of 300 in fp32
RUNS = ["dpo_full_dense", "dpo_lora_dense"]


def settings_of(hyper: dict[str, Any]) -> DpoSettings:
    same = ("loss_type", "beta", "label_smoothing", "sft_loss_ratio", "offset_alpha")
    return DpoSettings(**{name: hyper[name] for name in same}, batch_means=True)


@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_run_is_reproduced_from_its_micro_batches(name: str, paddle: Path) -> None:
    run = recorded_run(paddle, name)
    hyper, settings = run["hyper_parameters"], settings_of(run["hyper_parameters"])
    reference = ModelFolder(paddle / run["model"]).build()
    model = with_adapter(paddle) if "lora" in name else ModelFolder(paddle / run["model"]).build()

    def with_reference(batches: Any) -> list[Batch]:
        with torch.no_grad():
            known = [pair_log_probs(reference, batch) for batch in batches]
        return [replace(b, pairs=replace(b.pairs, reference=logps)) for b, logps in zip(batches, known)]

    step_metrics = StepMetrics(metric_names(settings), torch.device("cpu"))
    loss = partial(dpo_loss, settings=settings, step_metrics=step_metrics)
    engine = Engine([(0, model)], World(), pick("cpu"), loss)
    engine.step_metrics = step_metrics
    step = recorded_step(model, hyper, engine=engine, prepare=with_reference)
    micro, each = [pair_batch(b) for b in run["micro_batches"]], hyper["gradient_accumulation_steps"]
    results = [step(micro[i : i + each], i // each + 1) for i in range(0, len(micro), each)]
    assert [r.loss for r in results] == pytest.approx(run["loss"], abs=CURVE)
    check_last(results[-1].extras, run["last_log"])


def check_last(told: dict[str, float], recorded: dict[str, float]) -> None:
    """The last step's rewards, log-probabilities and losses under ERNIEKit's names."""
    names = [name for name in recorded if "/" in name or name.endswith("_loss")]
    assert len(names) == 8
    for name in names:
        assert told[name] == pytest.approx(recorded[name], abs=LOGPS if "logps" in name else 10 * CURVE), name


@pytest.mark.parametrize("name", RUNS)
def test_the_whole_recorded_run_comes_out_of_erniekit_train_with_compat(
    name: str, paddle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the recorded batches but the recorded rows: reader, template, shuffling, packing, reference, trainer and
    the evaluation after every step."""
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    run = recorded_run(paddle, name)
    logged = train_from_rows(
        paddle,
        name,
        tmp_path,
        stage="DPO",
        eval_dataset_path=tmp_path / "rows.jsonl",
        evaluation_strategy="steps",
        eval_steps=1,
        mask_out_eos_token=False,  # the recorded labels hold end tokens
    )
    training = [r for r in logged if "loss" in r]
    assert [r["loss"] for r in training] == pytest.approx(run["loss"], abs=CURVE)
    check_last(training[-1], run["last_log"])
    evaluated = [r["eval_loss"] for r in logged if "eval_loss" in r]
    # The recording's seventh evaluates the same weights once more, in another order.
    assert evaluated == pytest.approx(run["eval_loss_after_each_step"][:6], abs=CURVE)
