"""Whole DPO runs recorded from ERNIEKit on Paddle, all weights and LoRA: from their micro-batches, and from their rows.

The table of loss types and the curves without a trainer are in tests/unit/losses/test_dpo_paddle.py.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.data.types import IGNORE, Batch, Pairs, SharedKeys
from erniekit.lora.adapter import load_adapter
from erniekit.lora.adapter_files import read_adapter
from erniekit.lora.inject import inject
from erniekit.losses.dpo import DpoSettings, dpo_loss, metric_names, pair_log_probs
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.schedule import Schedule
from erniekit.parallel.engine import Engine
from erniekit.parallel.ledger import Ledger
from erniekit.parallel.mesh import World
from erniekit.train.step import TrainStep

CURVE = 1e-4  # fp32 on another BLAS: the fixtures' own cross-check differs by 3e-6 to 6e-6
LOGPS = 2e-3  # sums of 300 in fp32
RUNS = ["dpo_full_dense", "dpo_lora_dense"]


def recorded_run(paddle: Path, name: str) -> dict[str, Any]:
    return json.loads((paddle / "e2e.json").read_text())["runs"][name]


def batch_of(recorded: dict[str, Any]) -> Batch:
    """A recorded row: prompt | chosen | rejected of each pair, as ERNIEKit lays it out. A column's first masked row
    says which part it belongs to."""
    (ids,), (positions,) = recorded["input_ids"], recorded["position_ids"]
    (chosen,), (rejected,) = recorded["chosen_labels"], recorded["rejected_labels"]
    real = max(i for i, token in enumerate(ids) if token) + 1
    starts = [i for i in range(real) if positions[i] == 0] + [real]
    sizes, keys, segment = [], [], [-1] * len(ids)
    for pair, (start, end) in enumerate(pairwise(starts)):
        middle = min(recorded["attn_mask_start_row_indices"][0][start:end])
        sizes += [middle - start, end - middle]
        keys += [range(start, middle), [*range(start, start + positions[middle]), *range(middle, end)]]
        for i in range(start, end):
            segment[i] = 2 * pair if chosen[i] else 2 * pair + 1 if rejected[i] else -1
    if real < len(ids):
        sizes.append(len(ids) - real)
        keys.append(range(real, len(ids)))
    labels = [a or b or IGNORE for a, b in zip(chosen, rejected)]
    counts = [len(k) for k in keys]
    pairs = len(starts) - 1
    return Batch(
        torch.tensor([ids]),
        torch.tensor([labels]),
        torch.tensor([positions]),
        torch.tensor([0, *sizes]).cumsum(0).to(torch.int32),
        max(sizes),
        sum(label != IGNORE for label in labels),
        shared=SharedKeys(
            torch.tensor([i for k in keys for i in k]),
            torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            max(counts),
        ),
        pairs=Pairs(torch.tensor([segment]), pairs, torch.ones(pairs)),
    )


def settings_of(hyper: dict[str, Any]) -> DpoSettings:
    same = ("loss_type", "beta", "label_smoothing", "sft_loss_ratio", "offset_alpha")
    return DpoSettings(**{name: hyper[name] for name in same}, batch_means=True)


@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_run_is_reproduced_from_its_micro_batches(name: str, paddle: Path) -> None:
    run = recorded_run(paddle, name)
    hyper, settings = run["hyper_parameters"], settings_of(run["hyper_parameters"])
    reference, model = (ModelFolder(paddle / run["model"]).build() for _ in range(2))
    if "lora" in name:
        adapter = read_adapter(paddle / "dense_lora", model)
        inject(model, adapter.settings(model, shared_a=True), seed=0)
        load_adapter(model, adapter)

    def with_reference(batches: Any) -> list[Batch]:
        with torch.no_grad():
            known = [pair_log_probs(reference, batch) for batch in batches]
        return [replace(b, pairs=replace(b.pairs, reference=logps)) for b, logps in zip(batches, known)]

    groups = make_groups(model.named_parameters(), 3, hyper["weight_decay"])
    optimizer = AdamW(groups, (hyper["adam_beta1"], hyper["adam_beta2"]), hyper["adam_epsilon"])
    schedule = Schedule(
        hyper["lr_scheduler_type"],
        hyper["learning_rate"],
        hyper["max_steps"],
        hyper["warmup_steps"],
        hyper["min_lr"],
        compat=True,
    )
    ledger = Ledger(metric_names(settings), torch.device("cpu"))
    loss = partial(dpo_loss, settings=settings, ledger=ledger)
    engine = Engine([(0, model)], World(), torch.device("cpu"), loss)
    engine.ledger = ledger
    step = TrainStep(engine, optimizer, schedule, hyper["max_grad_norm"], compat=True, prepare=with_reference)
    micro, each = [batch_of(b) for b in run["micro_batches"]], hyper["gradient_accumulation_steps"]
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
    import erniekit

    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    run = recorded_run(paddle, name)
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    model.mkdir()
    for source in (run["model"], "tokenizer"):
        for file in (paddle / source).iterdir():
            shutil.copyfile(file, model / file.name)
    recorded = json.loads((paddle / "data_dpo.json").read_text())
    rows.write_text("".join(json.dumps(r["row"], ensure_ascii=False) + "\n" for r in recorded["rows"]))
    lora = {"fine_tuning": "LoRA", "lora_path": paddle / "dense_lora"} if "lora" in name else {"fine_tuning": "Full"}
    erniekit.run(
        "train",
        stage="DPO",
        model_name_or_path=model,
        train_dataset_path=rows,
        eval_dataset_path=rows,
        evaluation_strategy="steps",
        eval_steps=1,
        mask_out_eos_token=False,  # the recorded labels hold end tokens
        output_dir=tmp_path / "out",
        max_seq_len=recorded["max_seq_len"],
        compute_type="fp32",
        compat="erniekit",
        report_to="none",
        device="cpu",
        **lora,
        **run["hyper_parameters"],
    )
    logged = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    training = [r for r in logged if "loss" in r]
    assert [r["loss"] for r in training] == pytest.approx(run["loss"], abs=CURVE)
    check_last(training[-1], run["last_log"])
    evaluated = [r["eval_loss"] for r in logged if "eval_loss" in r]
    # The recording's seventh evaluates the same weights once more, in another order.
    assert evaluated == pytest.approx(run["eval_loss_after_each_step"][:6], abs=CURVE)
