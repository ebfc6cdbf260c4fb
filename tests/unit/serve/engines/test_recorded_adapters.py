"""With adapters loaded, steps in which no sequence has one compute none; the answers stay the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
import torch

from erniekit.api_load import Found, find_model
from erniekit.demo.tiny import make_tiny_model
from erniekit.devices.base import Device
from erniekit.lora.settings import LoRASettings
from erniekit.serve.engines.adapter_batch import AdapterExchange, BatchedLoRALinear, BatchedLoRARouter
from erniekit.serve.engines.embedded import EmbeddedEngine, EngineLimits
from erniekit.serve.engines.paged import PagedCache
from erniekit.serve.engines.recorded import RecordedSteps
from erniekit.serve.loaded_models import with_adapter
from support.engine_jobs import LENGTH, alone, answers, job, listen, make_adapter, prompts
from support.merged import fold
from support.recording_cpu import recording_cpu, small_cpu
from support.taught_mtp import taught

Served = tuple[Found, dict[str, Found]]


def made(folder: Path, family: str) -> Served:
    """A base, and adapters on all its projections, experts too."""
    base = find_model(make_tiny_model(folder / "base", family=family, layers=2))
    return base, {n: Found(base.weights, make_adapter(base.weights, folder / n, k)) for k, n in enumerate("ab")}


@pytest.fixture(scope="module", params=["ernie4_5", "ernie4_5_moe"])
def served(request, tmp_path_factory) -> Served:
    return made(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Served:
    return made(tmp_path_factory.mktemp("dense"), "ernie4_5")


@pytest.fixture
def products(monkeypatch) -> Counter[str]:
    """How often layers computed products of low rank, by kind."""
    count: Counter[str] = Counter()
    for kind in (BatchedLoRALinear, BatchedLoRARouter, AdapterExchange):

        def forward(self, *args, own=kind.forward, name=kind.__name__):
            count[name] += 1
            return own(self, *args)

        monkeypatch.setattr(kind, "forward", forward)
    return count


def started(base: torch.nn.Module, adapters: dict[str, Found], device: Device, **limits: int) -> EmbeddedEngine:
    mtp = limits.get("proposals", 0) > 0
    cache = PagedCache(base.config, 64, 4, torch.float32, "cpu", mtp)
    asked = EngineLimits(**{"sequences": 5, "tokens": 16, "length": LENGTH, **limits})
    trees = {name: with_adapter(base, adapter) for name, adapter in adapters.items()}
    return EmbeddedEngine({"m": base, **trees}, cache, asked, device)


def test_a_batch_without_adapters_computes_no_low_rank_product_and_a_mixed_one_does(served: Served, products):
    found, adapters = served
    engine = started(found.build(), adapters, recording_cpu())
    asked = prompts(4)
    try:
        answers(engine, [job([3])])  # all is recorded now, for which each step ran once
        products.clear()
        said = answers(engine, [job(p) for p in asked])
        assert not products
        mixed = [job(p, "mab"[k % 3]) for k, p in enumerate(asked)]
        beside = answers(engine, mixed)
        expected = {"BatchedLoRALinear"} | ({"AdapterExchange"} if found.weights.config.moe else set())
        assert products.keys() == expected
        products.clear()
        answers(engine, [job(asked[0], "a")])
        assert products.keys() == expected
    finally:
        engine.stop()
    merged = {"m": found.build()} | {name: fold(one.build()) for name, one in adapters.items()}
    assert said == [alone(merged["m"], p) for p in asked]
    assert beside == [alone(merged[one.model], list(one.prompt)) for one in mixed]


def test_an_adapter_that_cannot_be_batched_leaves_the_others_in_one_batch(dense: Served, products, tmp_path: Path):
    found, adapters = dense
    folder = make_adapter(found.weights, tmp_path / "dora", 4, LoRASettings(4, 8.0, dora=True))
    dora = Found(found.weights, folder)
    engine = started(found.build(), {"dora": dora, **adapters}, recording_cpu())
    jobs = [job(p, name) for p, name in zip(prompts(5), ("a", "dora", "m", "b", "dora"))]
    try:
        said = answers(engine, jobs)
        assert engine.recorded is not None
        assert [engine.recorded.tree_of(name) for name in ("m", "a", "b", "dora")] == ["", "", "", "dora"]
        assert products["BatchedLoRALinear"] > 0
    finally:
        engine.stop()
    expected = {"m": found.build(), **{name: one.build() for name, one in (*adapters.items(), ("dora", dora))}}
    assert said == [alone(expected[one.model], list(one.prompt)) for one in jobs]


def test_an_answer_goes_from_steps_without_adapters_to_those_with_them_and_back(served: Served, monkeypatch):
    """Alone while the prompt of its company is read, beside it, and alone again: the same tokens, in one cache and one
    state. Steps are recorded in between."""
    found, adapters = served
    engine = started(found.build(), adapters, recording_cpu())
    long, short = prompts(9)[8], [7, 8]
    assert len(long) > 32, "three chunks of 16 tokens"
    answers(engine, [job([3], "a")])  # what is recorded at the start is
    batches, work = [], RecordedSteps._work

    def noted(self, name, kind, size, draws):
        if kind == "batch" and name not in batches[-1:]:
            batches.append(name)
        return work(self, name, kind, size, draws)

    monkeypatch.setattr(RecordedSteps, "_work", noted)
    try:
        jobs = [job(short, max_tokens=40), job(long, "a", max_tokens=6)]
        said = asyncio.run(asyncio.wait_for(listen(engine, *jobs), 60))
    finally:
        engine.stop()
    assert batches == ["m", "", "m"]
    assert said == [alone(found.build(), short, 40), alone(fold(adapters["a"].build()), long, 6)]


def test_steps_without_adapters_are_recorded_when_the_first_of_their_size_comes(dense: Served):
    found, adapters = dense
    device = small_cpu()
    engine = started(found.build(), adapters, device)
    try:
        answers(engine, [job([3, 4], "a")])
        assert engine.recorded is not None
        sizes = len(engine.recorded.batches) + len(engine.recorded.chunks)
        assert len(device.room.taken) == sizes, "no more at the start than without them"
        answers(engine, [job([3, 4])])
        assert len(device.room.taken) == sizes + 2, "a chunk and a batch of one"
        answers(engine, [job([7, 8])])
        assert len(device.room.taken) == sizes + 2
    finally:
        engine.stop()


def test_without_memory_for_them_the_base_answers_in_the_steps_of_adapters(dense: Served, products, capsys):
    found, adapters = dense
    device = small_cpu()
    engine = started(found.build(), adapters, device)
    try:
        answers(engine, [job([3, 4], "a")])
        device.room.size = 1000  # others have taken the rest
        products.clear()
        said = answers(engine, [job(p) for p in prompts(3)], together=False)
        assert device.room.faults == 1, "it is not tried again"
        assert products.total() > 0
        assert engine.load().healthy
    finally:
        engine.stop()
    assert said == [alone(found.build(), p) for p in prompts(3)]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert "steps without adapters are not recorded" in told[0]
    assert told[0].endswith("a lower gpu_memory_utilization leaves more memory")


def test_proposals_for_the_base_are_made_without_adapters_too(products, tmp_path: Path):
    found = find_model(make_tiny_model(tmp_path / "moe", family="ernie4_5_moe", layers=2))
    adapter = Found(found.weights, make_adapter(found.weights, tmp_path / "a", 1))
    asked = prompts(2)
    base, expected = taught(found.build(), asked), [alone(found.build(), p) for p in asked]
    engine = started(base, {"a": adapter}, recording_cpu(), proposals=2)
    try:
        answers(engine, [job([3])])
        products.clear()
        assert answers(engine, [job(p) for p in asked]) == expected
        assert engine.load().proposals_held > 0
        assert not products
        beside = answers(engine, [job(asked[0]), job(asked[1], "a")])
        assert products
    finally:
        engine.stop()
    merged = fold(adapter.build())
    assert beside == [expected[0], alone(merged, asked[1])]
