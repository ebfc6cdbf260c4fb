"""Predicted against recorded: the peaks and steps of docs/performance.md, one H200. The table of docs/planner.md."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from erniekit.config import load
from erniekit.parallel.mesh import Layout
from erniekit.planner.cards import CARDS, rates_of
from erniekit.planner.evaluate import Site, evaluate
from erniekit.planner.job import Job
from erniekit.planner.memory import GIB
from erniekit.recipes.planning import job_of, shape_of


class Recorded(NamedTuple):
    words: str
    gib: float
    seconds: float
    again: int = 0  # layers that the run computed again
    document: int = 0
    trained: float = 1.0


_03B = "model_name_or_path=ERNIE-4.5-0.3B fine_tuning=Full"
_21B = "model_name_or_path=ERNIE-4.5-21B-A3B fine_tuning=LoRA lora_rank=32"
_DPO = "stage=DPO max_prompt_len=4096"
_13B = "model_name_or_path=llama-13b fine_tuning=Full stage=PT batch_size=4 max_seq_len=4096"
RUNS = {
    "A1": Recorded(f"{_03B} max_seq_len=8192", 11.0, 8192 / 123.4e3),
    "A1b": Recorded(f"{_03B} max_seq_len=8192 batch_size=4", 26.1, 32768 / 130.6e3),
    "A2-none": Recorded(f"{_03B} max_seq_len=32768", 26.1, 32768 / 207.6e3, document=1200),
    "A2-half": Recorded(f"{_03B} max_seq_len=32768", 26.0, 32768 / 237.5e3, document=1200, trained=0.5),
    "B1-100": Recorded(f"{_03B} max_seq_len=131072", 86.9, 131072 / 15.0e3),
    "C1-85": Recorded(f"{_21B} max_seq_len=8192", 71.9, 8192 / 26.0e3),
    "C1-60": Recorded(f"{_21B} max_seq_len=8192", 58.7, 8192 / 20.9e3, again=21),
    "C3": Recorded(f"{_21B} max_seq_len=32768", 104.7, 32768 / 16.0e3, again=11),
    "E1": Recorded(f"{_03B} {_DPO} max_seq_len=16384", 16.4, 4 / 34.8, document=3600, trained=0.25),
    "E2-live": Recorded(f"{_21B} {_DPO} max_seq_len=8192", 70.5, 8192 / 20.7e3, document=3600, trained=0.25),
    "F1": Recorded(_13B, 59.7, 16384 / 35.2e3),
    "F1b": Recorded(f"{_13B} use_lowprecision_moment=True", 49.1, 16384 / 35.5e3),
}  # fmt: skip


def job(run: Recorded) -> Job:
    words = run.words.split()
    layers = {"model_config": {"num_hidden_layers": 8}} if "llama" in run.words else {}
    fixed = ["train_dataset_path=y", "packing=True", "compute_type=bf16"]
    if "batch_size" not in run.words:
        fixed.append("batch_size=1")
    cfg = load([*fixed, *words], "train", layers)
    made = job_of(cfg, shape_of(cfg), cfg.train.per_device_train_batch_size)
    return replace(made, document=run.document, trained=run.trained, recomputed=run.again)


@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_runs_peak_and_step_are_predicted(name: str) -> None:
    run, card = RUNS[name], CARDS["h200"]
    made = evaluate(job(run), Layout(), Site(card, rates_of(card), 1), exact=True)
    gib = made.most.allocated / GIB
    print(f"{name}: {gib:.1f} GiB for {run.gib}, {made.seconds * 1e3:.0f} ms for {run.seconds * 1e3:.0f}")
    assert 0.98 <= gib / run.gib <= 1.05
    assert 0.9 <= made.seconds / run.seconds <= 1.1
