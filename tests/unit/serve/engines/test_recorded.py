"""Steps of fixed shapes, launched ahead, say what plain steps say; on a CPU they are launched and not replayed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from erniekit.api_load import Found, find_model
from erniekit.demo.tiny import make_tiny_model
from erniekit.kernels.rms_norm import rms_norm
from erniekit.models.layers.norm import RMSNorm
from erniekit.serve.engines.base import Done, GenerationJob, ModelRemoved, Token
from erniekit.serve.engines.embedded import EmbeddedEngine, EngineLimits
from erniekit.serve.engines.model_changes import ModelRefused
from erniekit.serve.engines.paged import PagedCache
from erniekit.serve.engines.recorded import RecordedSteps, sizes_up_to
from erniekit.serve.loaded_models import with_adapter
from support.clock import until
from support.engine_jobs import (
    LENGTH,
    alone,
    answers,
    engine_of,
    job,
    listen,
    make_adapter,
    prompts,
    says_the_same_in_a_small_cache,
)
from support.merged import fold


@pytest.fixture
def engine(small: Found) -> Iterator[EmbeddedEngine]:
    made = engine_of({"m": small.build()})
    yield made
    made.stop()


def test_every_family_says_together_what_it_says_without_a_cache(found: Found):
    asked = prompts(8)
    engine = engine_of({"m": found.build()})
    try:
        assert answers(engine, [job(p) for p in asked]) == [alone(found.build(), p) for p in asked]
        assert engine.load().cache_used == 0
        assert engine.recorded is not None
        assert len(engine.recorded.state.free) == 5
    finally:
        engine.stop()


class _FromOne(RMSNorm):
    """A norm that the weights are differences from one of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, 1 + self.weight, self.eps)


def test_a_family_with_norms_of_its_own_is_served_by_its_own_modules(small: Found):
    def build() -> torch.nn.Module:
        model = small.build()
        for layer in model.layers:
            layer.mlp_norm.__class__ = _FromOne
        return model

    engine, asked = engine_of({"m": build()}), prompts(4)
    try:
        assert engine.recorded is None, "recorded steps compute RMSNorm"
        assert answers(engine, [job(p) for p in asked]) == [alone(build(), p) for p in asked]
        assert alone(build(), asked[0]) != alone(small.build(), asked[0]), "another model than with usual norms"
    finally:
        engine.stop()


def test_a_cache_too_small_for_all_puts_some_back_and_changes_no_answer(small: Found):
    says_the_same_in_a_small_cache(engine_of({"m": small.build()}, blocks=18), small)


def test_drawn_tokens_are_those_of_plain_steps_in_any_company(small: Found, engine: EmbeddedEngine):
    cache = PagedCache(small.weights.config, 64, 4, torch.float32, "cpu")
    plain = EmbeddedEngine({"m": small.build()}, cache, EngineLimits(sequences=4, tokens=16, length=LENGTH))
    wishes = [{"top_p": 0.9}, {"top_k": 3}, {}, {"temperature": 0}, {"temperature": 0.4, "top_p": 0.5}]
    jobs = [job(p, **{"temperature": 1.2, "seed": k, **wishes[k % 5]}) for k, p in enumerate(prompts(10, seed=4))]
    try:
        assert answers(engine, jobs) == answers(plain, jobs, together=False)
    finally:
        plain.stop()


def test_penalties_bias_and_logprobs_know_what_was_said(small: Found, engine: EmbeddedEngine):
    cache = PagedCache(small.weights.config, 64, 4, torch.float32, "cpu")
    plain = EmbeddedEngine({"m": small.build()}, cache, EngineLimits(sequences=4, tokens=16, length=LENGTH))
    wishes = [
        {"repetition_penalty": 1.5}, {"frequency_penalty": 1.0, "temperature": 1.0, "seed": 1}, {"bias": ((7, 5.0),)},
        {"logprobs": 2}, {}, {"min_tokens": 5, "stop": range(0, 1200)},
    ]  # fmt: skip
    jobs = [job(p, **wishes[k]) for k, p in enumerate(prompts(6, seed=5))]

    async def events(engine: EmbeddedEngine, one: GenerationJob) -> list[object]:
        return [event async for _, event in engine.submit(one)]

    async def go(engine: EmbeddedEngine) -> list[list[object]]:
        return list(await asyncio.gather(*(events(engine, one) for one in jobs)))

    try:
        together, apart = asyncio.run(go(engine)), asyncio.run(go(plain))
    finally:
        plain.stop()
    assert [[getattr(e, "id", e) for e in one] for one in together] == [
        [getattr(e, "id", e) for e in one] for one in apart
    ]
    for mine, theirs in zip(together[3], apart[3]):
        if isinstance(mine, Token):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [id for id, _ in mine.top] == [id for id, _ in theirs.top]


def test_adapters_of_one_base_answer_side_by_side_as_each_merged(small: Found, tmp_path: Path):
    folders = {name: make_adapter(small.weights, tmp_path / name, seed) for seed, name in enumerate("ab")}
    base = small.build()
    trees = {name: with_adapter(base, Found(small.weights, folder)) for name, folder in folders.items()}
    engine = engine_of({"base": base, **trees})
    try:
        assert engine.recorded is not None
        assert {engine.recorded.tree_of(name) for name in ("base", "a", "b")} == {""}, "one launch for all"
        asked = [job(p, name) for p in prompts(2, seed=3) for name in ("base", "a", "b")]
        generated = answers(engine, asked)
    finally:
        engine.stop()
    assert engine.recorded.models[""].layers[0].attn.inner.cache is engine.cache, "the pool was copied"
    merged = {"base": small.build()} | {n: fold(Found(small.weights, f).build()) for n, f in folders.items()}
    assert generated == [alone(merged[one.model], list(one.prompt)) for one in asked]
    assert len({tuple(s) for s in generated[:3]}) == 3, "the adapters change nothing"


def test_adapters_of_experts_answer_side_by_side_as_each_merged(tmp_path: Path):
    found = find_model(make_tiny_model(tmp_path / "moe", family="ernie4_5_moe", layers=2))
    adapters = {n: Found(found.weights, make_adapter(found.weights, tmp_path / n, k)) for k, n in enumerate("ab")}
    base = found.build()
    engine = engine_of({"base": base, **{name: with_adapter(base, one) for name, one in adapters.items()}})
    asked = [job(p, name) for p in prompts(2, seed=3) for name in ("base", "a", "b")]
    try:
        assert engine.recorded is not None
        assert {engine.recorded.tree_of(name) for name in ("base", "a", "b")} == {""}, "one launch for all"
        generated = answers(engine, asked)
    finally:
        engine.stop()
    merged = {"base": found.build()} | {name: fold(one.build()) for name, one in adapters.items()}
    assert generated == [alone(merged[one.model], list(one.prompt)) for one in asked]
    assert len({tuple(s) for s in generated[:3]}) == 3, "the adapters change nothing"


def test_an_answer_ends_at_a_stop_token_and_what_was_computed_beyond_it_is_dropped(
    small: Found, engine: EmbeddedEngine
):
    generated = alone(small.build(), [3, 4, 5], 10)
    stop = generated[4]
    assert answers(engine, [job([3, 4, 5], stop=[stop])])[0] == generated[: generated.index(stop)]
    assert answers(engine, [job([3, 4, 5], stop=[stop], ignore_stop=True, max_tokens=5)])[0] == generated[:5]
    assert len(answers(engine, [job([3] * 60, max_tokens=1000)])[0]) == LENGTH - 60
    assert answers(engine, [job([5])])[0] == alone(small.build(), [5])


def test_cancelled_requests_leave_nothing_behind_and_change_no_other_answer(small: Found, engine: EmbeddedEngine):
    async def go() -> list[int]:
        gone = [engine.submit(job(p, max_tokens=50)) for p in prompts(4, seed=6)]
        stays = engine.submit(job([9, 8, 7]))
        await gone[0].events.get()
        for stream in gone:
            engine.cancel(stream)
        return [event.id async for _, event in stays if isinstance(event, Token)]

    assert asyncio.run(asyncio.wait_for(go(), 60)) == alone(small.build(), [9, 8, 7])
    assert answers(engine, [job([1, 2])])[0] == alone(small.build(), [1, 2])
    assert (engine.load().running, engine.load().cache_used) == (0, 0)


def test_a_request_that_breaks_a_recorded_step_fails_alone(small: Found, capsys):
    model = small.build()

    def poison(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        if (args[0] == 666).any():
            raise RuntimeError("poisoned")

    model.embedding.register_forward_pre_hook(poison)
    engine = engine_of({"m": model})

    async def go() -> tuple[list[int], list[object]]:
        good = engine.submit(job([3, 4], max_tokens=30))
        bad = engine.submit(job([5, 666]))
        return [e.id async for _, e in good if isinstance(e, Token)], [event async for _, event in bad]

    try:
        generated, end = asyncio.run(go())
        assert generated == alone(small.build(), [3, 4], 30)
        assert isinstance(end[-1], Done)
        assert end[-1].reason == "error"
        assert engine.load().healthy
        assert engine.load().cache_used == 0
    finally:
        engine.stop()


def test_sizes_that_are_recorded_double_up_to_the_largest():
    assert sizes_up_to(8) == [1, 2, 4, 8]
    assert sizes_up_to(5) == [1, 2, 4, 5]
    assert sizes_up_to(448, 16, 4) == [16, 64, 256, 448]


@torch.no_grad()
def test_log_probabilities_of_what_was_sampled_are_the_trainers(small: Found, engine: EmbeddedEngine):
    """By the forward pass that training makes, over prompt and answer at once."""
    prompt = [5, 9, 300, 7]

    async def go() -> list[Token]:
        asked = job(prompt, temperature=1.0, seed=3, logprobs=0)
        return [event async for _, event in engine.submit(asked) if isinstance(event, Token)]

    said = asyncio.run(go())
    model, ids = small.build().eval(), torch.tensor([[*prompt, *(token.id for token in said)]])
    losses = model(ids[:, :-1], labels=ids[:, 1:], per_token=True)[0, len(prompt) - 1 :]
    torch.testing.assert_close(torch.tensor([token.logprob for token in said]), -losses, atol=2e-5, rtol=1e-5)


def test_models_come_and_go_between_recorded_steps_and_running_answers_stay_what_they_are(small: Found, tmp_path: Path):
    """The steps are made anew for the new set of models; sequences take a slot there and go on."""
    adapter = find_model(make_adapter(small.weights, tmp_path / "a", 1), small.weights.path)
    base = small.build()
    tree = with_adapter(base, adapter)
    merged = fold(adapter.build())
    engine = engine_of({"m": base})
    asked = prompts(4, seed=11)

    async def go() -> tuple[list[list[int]], list[list[int]]]:
        running = [asyncio.ensure_future(listen(engine, job(p, max_tokens=30))) for p in asked[:2]]
        while engine.load().steps < 3:
            await asyncio.sleep(0.001)
        await asyncio.wrap_future(engine.add_model("new", tree))
        later = [asyncio.ensure_future(listen(engine, job(p, model="new"))) for p in asked[2:]]
        await asyncio.sleep(0)  # they are submitted
        while engine.load().waiting:
            await asyncio.sleep(0.001)
        engine.remove_model("new")
        return [(await one)[0] for one in running], [(await one)[0] for one in later]

    try:
        first, second = asyncio.run(asyncio.wait_for(go(), 60))
        assert first == [alone(small.build(), p, 30) for p in asked[:2]]
        assert second == [alone(merged, p) for p in asked[2:]]
        until(lambda: list(engine.models) == ["m"], "the one that was removed is gone")
        assert engine.recorded is not None
        assert len(engine.recorded.state.free) == 5
        assert answers(engine, [job(asked[0])])[0] == first[0][:12]
    finally:
        engine.stop()


@pytest.mark.parametrize("place", ["waiting", "running"])
def test_an_adapter_that_is_unloaded_as_its_last_client_disconnects_ends_no_other_answer(
    small: Found, monkeypatch, place: str
):
    """Cancelled behind `_wait`, a sequence is still in its place when models are changed."""
    base = small.build()
    engine = engine_of({"m": base, "other": with_adapter(base, small)})
    waited = engine._wait

    def wait() -> bool:
        goes_on = waited()
        streams = [run.stream for run in engine._running] if place == "running" else list(engine._waiting._lines)
        for stream in streams:
            if stream.jobs[0].model == "other":
                engine.cancel(stream)
                engine.remove_model("other")
        return goes_on

    monkeypatch.setattr(engine, "_wait", wait)

    async def go() -> list[int]:
        running = asyncio.ensure_future(listen(engine, job([3, 4, 5], max_tokens=30)))
        while not engine.load().steps:
            await asyncio.sleep(0.001)
        engine.submit(job([7, 8], model="other", max_tokens=50))
        return (await running)[0]

    try:
        assert asyncio.run(asyncio.wait_for(go(), 60)) == alone(small.build(), [3, 4, 5], 30)
        until(lambda: list(engine.models) == ["m"], "the one that was removed is gone")
        assert engine.load().healthy
    finally:
        engine.stop()


def test_an_adapter_for_which_there_is_no_memory_is_refused_and_answers_go_on(small: Found, monkeypatch):
    base = small.build()
    engine = engine_of({"m": base})
    recorded_all = RecordedSteps.record_all

    def record_all(steps: RecordedSteps) -> None:
        if "new" in steps.numbers:
            raise torch.OutOfMemoryError("out of memory")
        recorded_all(steps)

    monkeypatch.setattr(RecordedSteps, "record_all", record_all)

    async def go() -> list[int]:
        running = asyncio.ensure_future(listen(engine, job([3, 4, 5], max_tokens=30)))
        while engine.load().steps < 3:
            await asyncio.sleep(0.001)
        with pytest.raises(ModelRefused, match="out of memory"):
            await asyncio.wrap_future(engine.add_model("new", with_adapter(base, small)))
        with pytest.raises(ModelRemoved):
            engine.submit(job([7], model="new"))
        return (await running)[0]

    try:
        assert asyncio.run(asyncio.wait_for(go(), 60)) == alone(small.build(), [3, 4, 5], 30)
        assert engine.recorded is not None, "the steps of the models before are recorded again"
        assert (list(engine.models), len(engine.recorded.state.free)) == (["m"], 5)
    finally:
        engine.stop()
