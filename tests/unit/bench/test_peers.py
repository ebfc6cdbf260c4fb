"""Peers with adapters that are no longer zero: what a first step, where all are alike, cannot tell."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from erniekit.bench.data import make_steps
from erniekit.bench.peers import NEEDS, Needs, absent, peer_class
from erniekit.bench.runner import Task
from erniekit.bench.workloads import WORKLOADS, BenchOptions, tiny
from erniekit.devices import pick

WITH_ADAPTERS = [
    pytest.param(name, marks=pytest.mark.skipif(bool(absent(name)), reason=absent(name) or "-"))
    for name in ("peft", "peft-attention", "unsloth", "unsloth-4bit")
]


def runner_of(name: str, peer: str, folder: Path, **changes: object) -> Any:
    work = replace(tiny(WORKLOADS[name]), **changes)  # type: ignore[arg-type]
    (folder / "config.json").write_text(json.dumps(dict(work.model)))
    steps = make_steps(work.rows, int(work.model["vocab_size"]), 2, seed=0)
    return peer_class(peer)(Task(work, BenchOptions(tiny=True), folder, pick("cpu"), torch.float32, steps))


def move_adapters(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        if param.requires_grad:
            param.data = 0.02 * torch.randn(param.shape, generator=generator)


@pytest.mark.parametrize("peer", WITH_ADAPTERS)
def test_the_reference_of_a_preference_is_the_model_without_its_adapters(peer: str, tmp_path: Path) -> None:
    runner = runner_of("E2-live", peer, tmp_path)
    rows = runner.task.steps[0].rows
    with runner.active(), torch.no_grad():
        runner.build()
        plain = runner.answer_sums(runner.model, rows)
        move_adapters(runner.model)
        with runner.as_reference() as model:
            reference = runner.answer_sums(model, rows)
        trained = runner.answer_sums(runner.model, rows)
    torch.testing.assert_close(reference, plain)
    assert (trained - plain).abs().max() > 1e-2


@pytest.mark.parametrize("peer", WITH_ADAPTERS)
def test_recomputed_layers_train_every_adapter_the_same(peer: str, tmp_path: Path) -> None:
    found = []
    for recompute in (False, True):
        runner = runner_of("C3", peer, tmp_path, recompute=recompute)
        with runner.active():
            runner.build()
            move_adapters(runner.model)
            runner.loss(runner.task.steps[0].rows).backward()
        found.append({name: p.grad for name, p in runner.model.named_parameters() if p.requires_grad})
    kept, again = found
    assert all(grad is not None and grad.norm() > 0 for grad in again.values())
    torch.testing.assert_close(again, kept)


def test_a_package_inside_an_absent_one_is_absent_and_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NEEDS, "hf+fa4", Needs(("no_such_package.part",), "pip install that"))
    assert absent("hf+fa4") == "no_such_package.part is not installed: pip install that"


def test_a_peer_with_the_best_attention_is_told_where_a_rows_documents_end(tmp_path: Path) -> None:
    runner = runner_of("A2-none", "hf+fa4", tmp_path)
    runner.build()
    rows = runner.task.steps[0].rows
    assert runner.attention() == "sdpa"  # of a CPU
    assert set(runner.documents(rows)) == {"position_ids"}
    runner.flash4 = True
    given = runner.documents(rows)
    assert runner.attention() == "flash_attention_4"
    assert given["cu_seq_lens_q"].tolist() == given["cu_seq_lens_k"].tolist() == rows.bounds.tolist()
    assert given["max_length_q"] == given["max_length_k"] == rows.longest


def test_a_peer_with_masters_keeps_what_sixteen_bits_would_lose(tmp_path: Path) -> None:
    runner = runner_of("F1", "hf", tmp_path)
    runner.task = replace(runner.task, dtype=torch.bfloat16)
    runner.masters = True
    runner.build()
    before = [weight.detach().clone() for weight in runner.trained]
    for number in range(2):
        runner.step(number)
    moved = 0
    for old, master, weight in zip(before, runner.updated, runner.trained):
        assert master.dtype == torch.float32
        assert torch.equal(weight, master.bfloat16())
        moved += int((master != old.float()).sum() > int((weight != old).sum()))
    assert moved > len(before) // 2  # of most tensors more numbers have moved than 16 bits can show
