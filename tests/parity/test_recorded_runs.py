"""Whole runs recorded from ERNIEKit on Paddle: our step, optimiser and schedule must give the same curves."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.data.types import IGNORE, Batch
from erniekit.losses.causal import causal_loss
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.schedule import Schedule
from erniekit.train.step import TrainStep
from support.recorded import recorded_run, train_from_rows
from support.recorded_training import on_one_rank, plain_batch, recorded_step, with_adapter

CURVE = 1e-4  # fp32 on another BLAS: the fixtures' own cross-check differs by 2e-6 to 6e-6


def batch_of(recorded: dict[str, Any]) -> Batch:
    """A recorded micro-batch: documents from the first masked row of each column, labels where the mask is on."""
    ids = torch.tensor(recorded["input_ids"])
    labels = torch.tensor(recorded["labels"])
    if "loss_mask" in recorded:
        labels = labels.masked_fill(torch.tensor(recorded["loss_mask"]) == 0, IGNORE)
    B, L = ids.shape
    bounds, positions = [0], []
    for row in range(B):
        ends = sorted({end for end in recorded["attn_mask_start_row_indices"][row] if end > 0} | {L})
        for start, end in zip([0, *ends], ends):
            positions += list(range(end - start))
            bounds.append(row * L + end)
    return Batch(
        input_ids=ids,
        labels=labels,
        positions=torch.tensor(positions).view(B, L),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_doc=max(b - a for a, b in itertools.pairwise(bounds)),
        num_label_tokens=int((labels != IGNORE).sum()),
    )


def steps_of(run: dict[str, Any]) -> list[list[Batch]]:
    batches, per_step = (
        [batch_of(b) for b in run["micro_batches"]],
        run["hyper_parameters"]["gradient_accumulation_steps"],
    )
    return [batches[i : i + per_step] for i in range(0, len(batches), per_step)]


def test_recorded_full_sft_run_is_reproduced_step_by_step(paddle: Path) -> None:
    run = recorded_run(paddle, "sft_full_dense")
    step = recorded_step(ModelFolder(paddle / run["model"]).build(), run["hyper_parameters"])
    losses = [step(micro, k).loss for k, micro in enumerate(steps_of(run), start=1)]
    assert losses == pytest.approx(run["loss"], abs=CURVE)


def test_without_compat_the_same_batches_give_the_token_mean_and_a_first_step_that_moves(paddle: Path) -> None:
    run = recorded_run(paddle, "sft_full_dense")
    model = ModelFolder(paddle / run["model"]).build()
    before = model.embed.weight.detach().clone()
    step = recorded_step(model, run["hyper_parameters"], compat=False)
    micro = steps_of(run)[0]
    with torch.no_grad():
        sums = [float(causal_loss(model, b)) for b in micro]
    result = step(micro, 1)
    assert result.loss == pytest.approx(sum(sums) / sum(b.num_label_tokens for b in micro), abs=1e-5)
    assert result.loss != pytest.approx(run["loss"][0], abs=CURVE), "this step's micro-batches differ in trained tokens"
    assert result.learning_rate > 0
    assert not torch.equal(before, model.embed.weight)


def test_recorded_20_step_full_curve_is_reproduced(paddle: Path) -> None:
    numbers = json.loads((paddle / "dense.json").read_text())["full_finetune"]
    tensors = load_file(str(paddle / "dense.safetensors"))
    model = ModelFolder(paddle / "dense_old").build()
    groups = make_groups(model.named_parameters(), 3, numbers["weight_decay"])
    optimizer = AdamW(groups, (numbers["beta1"], numbers["beta2"]), 1e-8)
    schedule = Schedule("constant", numbers["learning_rate"], numbers["steps"])
    step = TrainStep(on_one_rank(model), optimizer, schedule, numbers["max_grad_norm"])
    results = []
    for k in range(numbers["steps"]):
        batch = plain_batch(tensors[f"train_ids.{k % 4}"], tensors[f"train_labels_shifted.{k % 4}"])
        results.append(step([batch], k + 1))
    assert [r.loss for r in results] == pytest.approx(numbers["loss"], abs=CURVE)
    assert [r.grad_norm for r in results] == pytest.approx(numbers["grad_norm_before_clip"], rel=1e-4)
    with torch.no_grad():
        logits = model(tensors["input_ids"][:1].long())
    assert float((logits - tensors["logits_after_training"]).abs().max()) < 1e-3  # 20 Adam steps amplify rounding


def test_recorded_lora_sft_run_is_reproduced_step_by_step(paddle: Path) -> None:
    """Paddle trains one A over the fused qkv and up_gate weights; so do we under compat."""
    run = recorded_run(paddle, "sft_lora_dense")
    model = with_adapter(paddle)
    step = recorded_step(model, run["hyper_parameters"])
    losses = [step(micro, k).loss for k, micro in enumerate(steps_of(run), start=1)]
    assert losses == pytest.approx(run["loss"], abs=CURVE)


@pytest.mark.parametrize("name", ["sft_full_dense", "sft_lora_dense"])
def test_the_whole_recorded_run_comes_out_of_erniekit_train_with_compat(
    name: str, paddle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the recorded batches but the recorded rows: reader, template, shuffling, packing, trainer, all of it."""
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    logged = train_from_rows(paddle, name, tmp_path, max_bad_fraction=1)
    assert [r["loss"] for r in logged] == pytest.approx(recorded_run(paddle, name)["loss"], abs=CURVE)
