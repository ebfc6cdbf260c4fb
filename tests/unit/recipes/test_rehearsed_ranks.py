"""Ranks that are recorded in other processes: the same calls, the same findings, the same refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from erniekit.config import load
from erniekit.parallel.layout import Layout
from erniekit.recipes import rehearsed_ranks
from erniekit.recipes.rehearsal import Rehearsal, prepare
from erniekit.rehearse.calls import Trace
from support.small_shape import EXPERTS

RANKS = (0, 1, 2, 3)
forks = pytest.mark.skipif(rehearsed_ranks.start_method() != "fork", reason="processes are not copied here")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rehearsal:
    """Two stages of two ranks; two cores, whatever this machine has."""
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    keys = dict(
        model_name_or_path=tmp_path, train_dataset_path="none.jsonl", tensor_parallel_degree=2, max_seq_len=32,
        pipeline_parallel_degree=2, gradient_accumulation_steps=2, compute_type="fp32", device="cpu", moe_group="mp",
    )  # fmt: skip
    monkeypatch.setattr(rehearsed_ranks.os, "sched_getaffinity", lambda _: {0, 1})
    cfg = load([f"{key}={value}" for key, value in keys.items()], "train")
    return prepare(cfg, Layout(pp=2, tp=2, experts="tp"), tmp_path)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """However short the first rank took; the methods that processes were started with."""
    asked: list[str] = []
    real = rehearsed_ranks.get_context
    monkeypatch.setitem(rehearsed_ranks.STARTS, "fork", 0.0)
    monkeypatch.setattr(rehearsed_ranks, "start_method", lambda: "fork")
    monkeypatch.setattr(rehearsed_ranks, "get_context", lambda method: asked.append(method) or real(method))
    return asked


@forks
def test_a_copied_process_records_what_this_one_does(job: Rehearsal, copied: list[str]) -> None:
    traces, findings = rehearsed_ranks.record_all(job, RANKS, quiet=True)
    assert copied == ["fork"]
    assert not findings
    assert traces == {rank: rehearsed_ranks.attempt(job, rank) for rank in RANKS}
    assert all(isinstance(trace, Trace) and trace.calls for trace in traces.values())


@forks
def test_an_error_in_a_copied_process_is_a_finding(
    job: Rehearsal, copied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = rehearsed_ranks.recorded

    def breaking(job: Rehearsal, rank: int) -> Trace:
        if rank == 2:
            raise RuntimeError("no such tensor")
        return real(job, rank)

    monkeypatch.setattr(rehearsed_ranks, "recorded", breaking)
    traces, (finding,) = rehearsed_ranks.record_all(job, RANKS, quiet=True)
    assert copied == ["fork"]
    assert sorted(traces) == [0, 1, 3]
    assert finding.ranks == (2,)
    assert "RuntimeError: no such tensor" in finding.what


@pytest.mark.skipif(sys.platform != "linux", reason="processes are copied on Linux only")
def test_processes_are_not_copied_where_there_is_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: card)
    assert rehearsed_ranks.start_method() == "spawn"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert rehearsed_ranks.start_method() == "fork"
