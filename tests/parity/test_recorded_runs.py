"""Whole runs recorded from ERNIEKit on Paddle: our step, optimiser and schedule must give the same curves."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.data.types import IGNORE, Batch
from erniekit.lora.adapter import load_adapter
from erniekit.lora.adapter_files import read_adapter
from erniekit.lora.inject import inject
from erniekit.losses.causal import causal_loss
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.schedule import Schedule
from erniekit.parallel.engine import Engine
from erniekit.parallel.mesh import World
from erniekit.train.step import TrainStep

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


def recorded_run(paddle: Path, name: str) -> dict[str, Any]:
    return json.loads((paddle / "e2e.json").read_text())["runs"][name]


def steps_of(run: dict[str, Any]) -> list[list[Batch]]:
    batches, per_step = (
        [batch_of(b) for b in run["micro_batches"]],
        run["hyper_parameters"]["gradient_accumulation_steps"],
    )
    return [batches[i : i + per_step] for i in range(0, len(batches), per_step)]


def on_one_rank(model: torch.nn.Module) -> Engine:
    return Engine([(0, model)], World(), torch.device("cpu"), causal_loss)


def train_step(model: torch.nn.Module, hyper: dict[str, Any], compat: bool) -> TrainStep:
    groups = make_groups(model.named_parameters(), 3, hyper["weight_decay"])
    optimizer = AdamW(groups, (hyper["adam_beta1"], hyper["adam_beta2"]), hyper["adam_epsilon"])
    schedule = Schedule(
        hyper["lr_scheduler_type"],
        hyper["learning_rate"],
        hyper["max_steps"],
        hyper["warmup_steps"],
        hyper["min_lr"],
        compat=compat,
    )
    return TrainStep(on_one_rank(model), optimizer, schedule, hyper["max_grad_norm"], compat)


def test_recorded_full_sft_run_is_reproduced_step_by_step(paddle: Path) -> None:
    run = recorded_run(paddle, "sft_full_dense")
    step = train_step(ModelFolder(paddle / run["model"]).build(), run["hyper_parameters"], compat=True)
    losses = [step(micro, k).loss for k, micro in enumerate(steps_of(run), start=1)]
    assert losses == pytest.approx(run["loss"], abs=CURVE)


def test_without_compat_the_same_batches_give_the_token_mean_and_a_first_step_that_moves(paddle: Path) -> None:
    run = recorded_run(paddle, "sft_full_dense")
    model = ModelFolder(paddle / run["model"]).build()
    before = model.embed.weight.detach().clone()
    step = train_step(model, run["hyper_parameters"], compat=False)
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
        ids, labels = tensors[f"train_ids.{k % 4}"].long(), tensors[f"train_labels_shifted.{k % 4}"].long()
        B, L = ids.shape
        batch = Batch(
            ids,
            labels,
            torch.arange(L).expand(B, L),
            torch.arange(0, B * L + 1, L, dtype=torch.int32),
            L,
            int((labels != IGNORE).sum()),
            packed=False,
        )
        results.append(step([batch], k + 1))
    assert [r.loss for r in results] == pytest.approx(numbers["loss"], abs=CURVE)
    assert [r.grad_norm for r in results] == pytest.approx(numbers["grad_norm_before_clip"], rel=1e-4)
    with torch.no_grad():
        logits = model(tensors["input_ids"][:1].long())
    assert float((logits - tensors["logits_after_training"]).abs().max()) < 1e-3  # 20 Adam steps amplify rounding


def test_recorded_lora_sft_run_is_reproduced_step_by_step(paddle: Path) -> None:
    """Paddle trains one A over the fused qkv and up_gate weights; so do we under compat."""
    run = recorded_run(paddle, "sft_lora_dense")
    model = ModelFolder(paddle / run["model"]).build()
    adapter = read_adapter(paddle / "dense_lora", model)
    inject(model, adapter.settings(model, shared_a=True), seed=0)
    load_adapter(model, adapter)
    step = train_step(model, run["hyper_parameters"], compat=True)
    losses = [step(micro, k).loss for k, micro in enumerate(steps_of(run), start=1)]
    assert losses == pytest.approx(run["loss"], abs=CURVE)


@pytest.mark.parametrize("name", ["sft_full_dense", "sft_lora_dense"])
def test_the_whole_recorded_run_comes_out_of_erniekit_train_with_compat(
    name: str, paddle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the recorded batches but the recorded rows: reader, template, shuffling, packing, trainer, all of it."""
    import erniekit

    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    run = recorded_run(paddle, name)
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    model.mkdir()
    for source in (run["model"], "tokenizer"):
        for file in (paddle / source).iterdir():
            shutil.copyfile(file, model / file.name)
    recorded = json.loads((paddle / "data_sft.json").read_text())
    rows.write_text("".join(json.dumps(r["row"], ensure_ascii=False) + "\n" for r in recorded["sft_rows"]))
    lora = {"fine_tuning": "LoRA", "lora_path": paddle / "dense_lora"} if "lora" in name else {"fine_tuning": "Full"}
    erniekit.run(
        "train",
        model_name_or_path=model,
        train_dataset_path=rows,
        output_dir=tmp_path / "out",
        max_seq_len=recorded["max_seq_len"],
        compute_type="fp32",
        compat="erniekit",
        max_bad_fraction=1,
        report_to="none",
        device="cpu",
        **lora,
        **run["hyper_parameters"],
    )
    logged = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [r["loss"] for r in logged] == pytest.approx(run["loss"], abs=CURVE)
