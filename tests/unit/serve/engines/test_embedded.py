"""The embedded engine says what the model alone would say, whoever else is speaking, and outlives its requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from erniekit.api_load import Found
from erniekit.serve.engines.base import Done, GenerationJob, ModelRemoved, QueueFull
from erniekit.serve.engines.embedded import EmbeddedEngine, EngineLimits
from erniekit.serve.engines.paged import PagedCache
from erniekit.serve.loaded_models import with_adapter
from support import engine_jobs
from support.clock import PATIENCE_S, until
from support.engine_jobs import (
    LENGTH,
    alone,
    answers,
    job,
    listen,
    make_adapter,
    prompts,
    says_the_same_in_a_small_cache,
)
from support.merged import fold
from support.transformers_loop import said_by_transformers


def engine_of(models: dict[str, torch.nn.Module], blocks: int = 64, size: int = 4, **limits: int) -> EmbeddedEngine:
    model = next(iter(models.values()))
    cache = PagedCache(model.config, blocks, size, torch.float32, "cpu")
    return EmbeddedEngine(models, cache, EngineLimits(**{"sequences": 4, "tokens": 16, "length": LENGTH, **limits}))


@pytest.fixture
def engine(small: Found) -> Iterator[EmbeddedEngine]:
    made = engine_of({"m": small.build()})
    yield made
    made.stop()


def hold(model: torch.nn.Module, steps: int) -> threading.Event:
    """The engine makes so many steps, and the next one only after the event: the thread of the test may be late."""
    go_on, made = threading.Event(), []

    def wait(*_: object) -> None:
        made.append(1)
        if len(made) > steps:
            assert go_on.wait(PATIENCE_S)

    model.layers[0].register_forward_pre_hook(wait)
    return go_on


def test_every_family_says_together_what_it_says_without_a_cache(found: Found):
    asked = prompts(8)
    engine = engine_of({"m": found.build()})
    try:
        assert answers(engine, [job(p) for p in asked]) == [alone(found.build(), p) for p in asked]
        assert engine.load().cache_used == 0
    finally:
        engine.stop()


def test_it_says_what_transformers_says(small: Found, engine: EmbeddedEngine):
    tokenizer = small.tokenizer()
    stops = [tokenizer.eos_id, tokenizer.end_id]
    for prompt in prompts(3, seed=1):
        (generated,) = answers(engine, [job(prompt, stop=stops)])
        count = min(12, LENGTH - len(prompt))
        assert generated == said_by_transformers(small.build(), prompt, count, stops)


def test_a_cache_too_small_for_all_puts_some_back_and_changes_no_answer(small: Found):
    says_the_same_in_a_small_cache(engine_of({"m": small.build()}, blocks=18), small)


def test_adapters_of_one_base_answer_side_by_side_as_each_merged(found: Found, tmp_path: Path):
    names = ["a", "b"]
    folders = {name: make_adapter(found.weights, tmp_path / name, seed) for seed, name in enumerate(names)}
    base = found.build()
    trees = {name: with_adapter(base, Found(found.weights, folder)) for name, folder in folders.items()}
    shared = {t.data_ptr() for t in base.state_dict().values()}
    assert shared <= {t.data_ptr() for t in trees["a"].state_dict().values()}, "the base was copied"
    engine = engine_of({"base": base, **trees})
    try:
        asked = [job(p, name) for p in prompts(2, seed=3) for name in ("base", *names)]
        generated = answers(engine, asked)
    finally:
        engine.stop()
    merged = {"base": found.build()} | {n: fold(Found(found.weights, f).build()) for n, f in folders.items()}
    assert generated == [alone(merged[one.model], list(one.prompt)) for one in asked]
    assert len({tuple(s) for s in generated[:3]}) == 3, "the adapters change nothing"


def test_a_seed_says_the_same_in_any_company(engine: EmbeddedEngine):
    mine = job([7, 8, 9], temperature=1.3, top_p=0.9, seed=5)
    others = [job(p, temperature=1.0, seed=k) for k, p in enumerate(prompts(6, seed=4))]
    first = answers(engine, [mine])[0]
    assert answers(engine, [*others[:3], mine, *others[3:]])[3] == first
    assert answers(engine, [job([7, 8, 9], temperature=1.3, top_p=0.9, seed=6)])[0] != first


def test_a_cancelled_request_frees_its_blocks_and_says_no_more(engine: EmbeddedEngine):
    go_on = hold(engine.models["m"], steps=9)

    async def go() -> int:
        stream = engine.submit(job([3] * 10, max_tokens=50))
        other = asyncio.ensure_future(listen(engine, job([4, 5])))
        await stream.events.get()
        engine.cancel(stream)
        go_on.set()
        await other  # which ends later: behind it nothing of the cancelled one is on its way
        heard = stream.events.qsize()
        await asyncio.sleep(0.1)
        assert stream.events.qsize() == heard
        engine.cancel(stream)  # twice does no harm
        return heard

    assert asyncio.run(go()) < 9
    assert (engine.load().running, engine.load().cache_used) == (0, 0)


def test_one_of_several_answers_can_be_cancelled_and_the_others_go_on(engine: EmbeddedEngine):
    go_on = hold(engine.models["m"], steps=9)

    async def go() -> list[list[int]]:
        stream = engine.submit(*[job([9, 9], max_tokens=40)] * 3)
        generated: list[list[int]] = [[], [], []]
        left = {0, 1, 2}
        while left:
            number, event = await asyncio.wait_for(stream.events.get(), 30)
            if isinstance(event, Done):
                left.discard(number)
            else:
                generated[number].append(event.id)
            if number == 1 and 1 in left:
                engine.cancel(stream, 1)
                go_on.set()
                left.discard(1)
        return generated

    generated = asyncio.run(go())
    assert [len(s) for s in generated] == [40, len(generated[1]), 40]
    assert len(generated[1]) < 40


def test_a_request_that_breaks_a_step_fails_alone(small: Found, capsys):
    """Token 666 raises in the embedding; who shares the step with it notices nothing."""
    model = small.build()

    def poison(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        if (args[0] == 666).any():
            raise RuntimeError("poisoned")

    model.embedding.register_forward_pre_hook(poison)
    engine = engine_of({"m": model})
    try:

        async def go() -> tuple[list[int], Done]:
            good = asyncio.ensure_future(listen(engine, job([3, 4])))
            bad = engine.submit(job([5, 666]))
            events = [event async for _, event in bad]
            return (await good)[0], events[-1]

        generated, end = asyncio.run(go())
        assert generated == alone(small.build(), [3, 4])
        assert end.reason == "error"
        assert "poisoned" not in end.message, "that is for the log"
        assert "poisoned" in capsys.readouterr().err
        assert engine.load().healthy
        assert engine.load().cache_used == 0
    finally:
        engine.stop()


def test_an_engine_that_fails_at_everything_calls_itself_ill_and_recovers(small: Found):
    model = small.build()
    broken = model.embedding.register_forward_pre_hook(lambda *_: 1 / 0)
    engine = engine_of({"m": model})
    try:

        async def ends() -> list[str]:
            return [event.reason async for _, event in engine.submit(job([3])) if isinstance(event, Done)]

        for _ in range(3):
            assert asyncio.run(ends()) == ["error"]
        assert not engine.load().healthy
        broken.remove()
        assert asyncio.run(ends()) == ["length"]
        assert engine.load().healthy
    finally:
        engine.stop()


def test_requests_that_fail_for_themselves_never_make_the_engine_unhealthy(small: Found, capsys):
    model = small.build()
    calls: list[int] = []

    def poison(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        calls.append(int(args[0].max()))
        if (args[0] == 666).any():
            raise RuntimeError("poisoned")

    model.embedding.register_forward_pre_hook(poison)
    engine = engine_of({"m": model})
    try:

        async def go(*jobs: GenerationJob) -> list[str]:
            return [event.reason async for _, event in engine.submit(*jobs) if isinstance(event, Done)]

        for _ in range(5):
            assert asyncio.run(go(job([5, 666]))) == ["error"]
        assert asyncio.run(go(*[job([5, 666])] * 16)) == ["error"] * 16
        assert calls.count(666) >= 6, "they did fail"
        assert engine.load().healthy
        assert engine.load().cache_used == 0
    finally:
        engine.stop()


def test_an_unhealthy_engine_finds_out_by_itself_that_it_works_again(small: Found, monkeypatch):
    monkeypatch.setattr("erniekit.serve.engines.embedded.PROBE_S", 0.02)
    model = small.build()
    broken = model.embedding.register_forward_pre_hook(lambda *_: 1 / 0)
    engine = engine_of({"m": model})
    try:

        async def ends() -> list[str]:
            return [event.reason async for _, event in engine.submit(job([3])) if isinstance(event, Done)]

        for _ in range(3):
            assert asyncio.run(ends()) == ["error"]
        time.sleep(0.2)
        assert not engine.load().healthy
        assert "ZeroDivisionError" in engine.load().reason
        broken.remove()
        until(lambda: engine.load().healthy)
        assert (engine.load().running, engine.load().cache_used) == (0, 0)
    finally:
        engine.stop()


def test_a_model_that_gives_no_numbers_is_an_error_not_a_token(small: Found):
    model = small.build()
    model.norm.register_forward_hook(lambda module, args, out: out * float("nan"))
    engine = engine_of({"m": model})
    try:

        async def go() -> list[object]:
            return [event async for _, event in engine.submit(job([3]))]

        (end,) = asyncio.run(go())
        assert (type(end), end.reason) == (Done, "error")
    finally:
        engine.stop()


def test_a_full_queue_is_told_at_once_and_a_stopped_engine_ends_every_stream(small: Found):
    model = small.build()
    go_on = hold(model, steps=1)
    engine = engine_of({"m": model}, sequences=1, queue=2)

    async def go() -> None:
        streams = [engine.submit(job([3], max_tokens=60))]
        while len(streams) < 6:
            try:
                streams.append(engine.submit(job([3], max_tokens=60)))
            except QueueFull:
                break
        assert len(streams) == 3, "one may run and two wait"
        stopping = asyncio.ensure_future(asyncio.to_thread(engine.stop, "closing"))
        while engine.load().healthy:
            await asyncio.sleep(0.01)
        go_on.set()
        await stopping
        for stream in streams:
            assert [event async for _, event in stream][-1] == Done("error", "closing")
        late = [event async for _, event in engine.submit(job([3]))]
        assert late == [Done("error", "closing")]

    asyncio.run(asyncio.wait_for(go(), 60))
    assert not engine.load().healthy


def test_an_answer_ends_at_a_stop_token_and_at_the_end_of_the_context(small: Found, engine: EmbeddedEngine):
    generated = alone(small.build(), [3, 4, 5], 10)
    assert answers(engine, [job([3, 4, 5], stop=[generated[4]])])[0] == generated[: generated.index(generated[4])]
    assert answers(engine, [job([3, 4, 5], stop=[generated[0]], ignore_stop=True, max_tokens=5)])[0] == generated[:5]
    assert len(answers(engine, [job([3] * 60, max_tokens=1000)])[0]) == LENGTH - 60


def test_no_sequence_begins_with_a_model_that_was_removed_and_those_that_run_end(small: Found):
    base = small.build()
    engine = engine_of({"m": base, "other": with_adapter(base, small)})
    go_on = hold(engine.models["other"], 0)

    async def go() -> list[int]:
        running = asyncio.ensure_future(listen(engine, job([7, 8], model="other")))
        while not engine.load().running:
            await asyncio.sleep(0.001)
        engine.remove_model("other")
        with pytest.raises(ModelRemoved):
            engine.submit(job([7, 8], model="other"))
        go_on.set()
        return (await running)[0]

    try:
        assert asyncio.run(go()) == alone(small.build(), [7, 8])
        until(lambda: list(engine.models) == ["m"])
        with pytest.raises(ModelRemoved):
            asyncio.run(listen(engine, job([7, 8], model="other")))
    finally:
        engine.stop()


@pytest.mark.parametrize("make", [engine_of, engine_jobs.engine_of], ids=["plain", "recorded"])
@pytest.mark.parametrize("tokens", [64, 8], ids=["in one piece", "in several"])
def test_a_token_without_numbers_does_not_spoil_the_prefix_that_others_begin_with(
    small: Found, tokens: int, make: Callable[..., EmbeddedEngine]
):
    """Its NaN reaches places before it in the same piece, masked as they are."""
    model, begin, bad, good = small.build(), list(range(40, 54)), 7, 8
    embed = model.embed_ids
    model.embed_ids = lambda ids: embed(ids).masked_fill((ids == bad)[..., None], float("nan"))
    engine = make({"m": model}, tokens=tokens)
    try:

        async def ends(prompt: list[int]) -> str:
            return [event async for _, event in engine.submit(job(prompt))][-1].reason

        assert asyncio.run(ends([*begin, bad, 9])) == "error"
        assert asyncio.run(ends([*begin, good])) == "length"
        before = engine.load().prefix_hits
        assert asyncio.run(ends(begin)) == "length"
        assert engine.load().prefix_hits > before, "what has numbers is shared"
    finally:
        engine.stop()
