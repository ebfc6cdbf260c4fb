"""Turns: real trainers on a tiny model give the same numbers, and a peer's failure stays its own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from erniekit.bench.card import Watch
from erniekit.bench.data import make_steps
from erniekit.bench.parity import compare
from erniekit.bench.peers.hf import Transformers
from erniekit.bench.runner import Patch, StepNumbers, Task
from erniekit.bench.turns import Lane, Turns
from erniekit.bench.workloads import WORKLOADS, BenchOptions, tiny
from erniekit.devices import pick
from support.clock import until

FLOAT = torch.float32
Make = Callable[..., Task]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def task(name: str, **options: object) -> Task:
        work = tiny(WORKLOADS[name])
        (tmp_path / "config.json").write_text(json.dumps(dict(work.model)))
        settings = BenchOptions(**{"steps": 2, "warmup": 1, "tiny": True, **options})  # type: ignore[arg-type]
        data = make_steps(work.rows, int(work.model["vocab_size"]), 2, settings.seed)
        return Task(work, settings, tmp_path, pick("cpu"), FLOAT, data)

    return task


def test_a_peer_with_other_weights_is_found_out(make: Make) -> None:
    ours = Turns(make("A1"), (), None)
    other = Turns(replace(make("A1"), options=BenchOptions(steps=1, warmup=1, seed=1)), (), None)
    ours.run()
    other.run()
    found = compare(ours.task.workload, ours.lanes[0], other.lanes[0], FLOAT)
    assert "logits" in found["wrong"]
    assert not found["equal"]


class Hungry(Transformers):
    """Runs out of memory until it is asked to be thrifty."""

    def step(self, number: int) -> StepNumbers:
        if not self.thrifty:
            raise torch.cuda.OutOfMemoryError("no room")
        return super().step(number)


class Broken(Transformers):
    def build(self) -> None:
        raise RuntimeError("no such kernel\nand a long story")


@pytest.mark.parametrize(
    "name", ["A1", pytest.param("B1-30", marks=pytest.mark.full)]
)  # all at once, one after another
def test_out_of_memory_is_tried_again_and_a_broken_peer_is_a_line(make: Make, name: str) -> None:
    task = make(name)
    task = replace(task, workload=replace(task.workload, recompute=False))
    turns = Turns(task, (), None)
    turns.lanes += [Lane(Hungry(task)), Lane(Broken(task))]
    turns.run()
    ours, hungry, broken = turns.lanes
    assert len(hungry.seconds) == 2
    assert hungry.record()["note"] == "layers recomputed"
    assert compare(task.workload, ours, hungry, FLOAT)["equal"]
    assert broken.record() == {"runner": "hf", "failed": "RuntimeError: no such kernel"}
    assert len(ours.seconds) == 2


class Slow(Transformers):
    def step(self, number: int) -> StepNumbers:
        time.sleep(0.01)
        return super().step(number)


@pytest.mark.parametrize(
    ("name", "rounds"), [("A1", 2), pytest.param("B1-30", 1, marks=pytest.mark.full)]
)  # a peer's turns: two short, or one
def test_a_card_works_for_a_while_before_each_turn_is_timed(make: Make, name: str, rounds: int) -> None:
    task = make(name, warmup=1)
    turns = Turns(task, (), None)
    turns.lanes.append(Lane(Slow(task)))
    turns.gauge.settle = 0.1  # as on a card
    turns.run()
    for lane in turns.lanes:
        assert len(lane.seconds) == task.options.steps
    ahead = turns.lanes[1].next_step - task.options.warmup - task.options.steps
    assert rounds <= ahead <= rounds * 11  # a step takes 0.01 s or more
    without = Turns(task, (), None)
    without.run()
    assert without.lanes[0].record()["steps_run"] == task.options.warmup + task.options.steps


def test_warm_up_steps_that_were_long_enough_need_no_more(make: Make) -> None:
    task = make("B1-30", warmup=2)
    turns = Turns(task, (), None)
    turns.lanes[0] = Lane(Slow(task))
    turns.gauge.settle = 0.01
    turns.run()
    assert turns.lanes[0].next_step == task.options.warmup + task.options.steps


def test_each_runners_result_has_the_cards_gauges_while_its_steps_were_timed(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nwhile true; do echo '1485, 688.4, 61'; sleep 0.02; done\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with Watch("GPU-1234") as watch:
        until(lambda: watch.last(60))
        for _ in range(20):  # a program that gets no time meanwhile gives no reading of these steps
            turns = Turns(make("A1"), ("hf",), None, watch)
            turns.run()
            if all("clock_mhz" in lane.record() for lane in turns.lanes):
                break
    for run in (lane.record() for lane in turns.lanes):
        assert (run["clock_mhz"], run["power_w"], run["temperature_c"]) == (1485.0, 688.4, 61.0)


def test_what_has_not_begun_when_time_is_up_is_not_begun(make: Make) -> None:
    turns = Turns(make("B1-30"), ("hf",), deadline=0.0)
    turns.run()
    ours, peer = turns.lanes
    assert len(ours.seconds) == 1  # its first turn; the second would have come after the peer's
    assert peer.record() == {"runner": "hf", "failed": "no time left"}


def test_a_patch_is_there_only_for_who_asked_for_it() -> None:
    class Shared:
        word = "plain"

    calls = []

    def apply() -> None:
        calls.append(1)
        Shared.word = "patched"

    patch = Patch((Shared, "word"))
    for _ in range(2):
        with patch.on(apply):
            assert Shared.word == "patched"
        assert Shared.word == "plain"
    assert len(calls) == 1


def test_a_skewed_router_prefers_some_experts(make: Make) -> None:
    shares = []
    for name in ("C1-85", "C1-skew"):
        turns = Turns(make(name), (), None)
        turns.run()
        shares.append(turns.busiest)
    even, skewed = shares
    assert even is not None
    assert skewed is not None
    assert even < 0.25 < skewed <= 0.5  # of 8 experts; two are chosen, so none has more than half
