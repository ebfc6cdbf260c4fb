"""Proposals of the MTP layer change how many steps an answer takes, and none of its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from erniekit.api_load import Found, find_model
from erniekit.demo.tiny import make_tiny_model
from erniekit.devices import pick
from erniekit.serve.engines.base import Done, Event, GenerationJob, Token
from erniekit.serve.engines.embedded import EmbeddedEngine, EngineLimits
from erniekit.serve.engines.paged import PagedCache
from erniekit.serve.loaded_models import with_adapter
from support.engine_jobs import LENGTH, alone, answers, job, make_adapter, prompts
from support.recording_cpu import recording_cpu
from support.taught_mtp import taught

Start = Callable[..., EmbeddedEngine]


@pytest.fixture(scope="module")
def moe(tmp_path_factory) -> Found:
    return find_model(make_tiny_model(tmp_path_factory.mktemp("moe"), family="ernie4_5_moe"))


@pytest.fixture(scope="module")
def model(moe: Found) -> torch.nn.Module:
    return taught(moe.build(), prompts(4))


@pytest.fixture(params=["plain", "recorded"])
def start(request, model: torch.nn.Module) -> Iterator[Start]:
    """Starts an engine on this model, by default with proposals of three tokens."""
    engines: list[EmbeddedEngine] = []

    def started(proposals: int = 3, models: dict | None = None, blocks: int = 64, **limits: int) -> EmbeddedEngine:
        cache = PagedCache(model.config, blocks, 4, torch.float32, "cpu", mtp=proposals > 0)
        asked = EngineLimits(**{"sequences": 5, "tokens": 16, "length": LENGTH, "proposals": proposals, **limits})
        device = pick("cpu", False) if request.param == "recorded" else None
        engines.append(EmbeddedEngine(models or {"m": model}, cache, asked, device))
        return engines[-1]

    yield started
    for engine in engines:
        engine.stop()


def test_greedy_answers_are_those_without_proposals_and_take_fewer_steps(model, start: Start):
    engine, asked = start(), prompts(8)
    expected = [alone(model_alone(model), p) for p in asked]
    assert answers(engine, [job(p) for p in asked]) == expected
    load = engine.load()
    assert 0 < load.proposals_held < load.proposed, "proposals should hold for some and fail for others"
    assert load.cache_used == 0
    before = load.steps
    assert answers(engine, [job(asked[0])])[0] == expected[0], "a shared prefix"
    few = engine.load().steps - before
    plain = start(proposals=0, burst=1)
    answers(plain, [job(asked[0])])
    assert few < plain.load().steps


def test_recording_a_step_in_the_middle_of_an_answer_changes_no_token(model):
    """Work for requests with logprobs is recorded when the first of them comes; recording runs it once."""
    cache = PagedCache(model.config, 64, 4, torch.float32, "cpu", mtp=True)
    limits = EngineLimits(sequences=3, tokens=16, length=LENGTH, proposals=2)
    engine = EmbeddedEngine({"m": model}, cache, limits, recording_cpu())
    asked = prompts(6)
    jobs = [job(p, **({"logprobs": 0} if k == 4 else {})) for k, p in enumerate(asked)]
    try:
        assert answers(engine, jobs) == [alone(model_alone(model), p) for p in asked]
        assert engine.recorded is not None
        assert engine.load().proposals_held > 0
    finally:
        engine.stop()


def model_alone(model: torch.nn.Module) -> torch.nn.Module:
    """A copy that no engine has given a cache."""
    made = type(model)(model.config)
    made.load_state_dict(model.state_dict())
    return made.eval()


def test_an_answer_ends_inside_a_proposal_at_a_stop_token_or_at_its_limit(model, start: Start):
    engine, prompt = start(), prompts(4)[1]
    said = alone(model_alone(model), prompt)
    assert answers(engine, [job(prompt, max_tokens=n) for n in range(1, 13)]) == [said[:n] for n in range(1, 13)]
    expected = [said[: said.index(stop)] for stop in said]
    assert answers(engine, [job(prompt, stop=[stop]) for stop in said]) == expected
    whole = answers(engine, [job(prompt, stop=[stop], ignore_stop=True) for stop in said])
    assert whole == [said] * len(said)
    assert engine.load().proposals_held > 12, "proposals held nowhere"
    assert len(answers(engine, [job([3] * 60, max_tokens=1000)])[0]) == LENGTH - 60, "the end of the context"


def events(engine: EmbeddedEngine, jobs: list[GenerationJob]) -> list[list[Event]]:
    async def one(asked: GenerationJob) -> list[Event]:
        return [event async for _, event in engine.submit(asked)]

    async def go() -> list[list[Event]]:
        return list(await asyncio.gather(*map(one, jobs)))

    return asyncio.run(asyncio.wait_for(go(), 120))


def test_drawn_tokens_penalties_and_logprobs_are_those_without_proposals(start: Start):
    wishes = [
        {"temperature": 0.7, "seed": 1}, {"temperature": 1.0, "top_p": 0.6, "seed": 2}, {}, {"logprobs": 2},
        {"repetition_penalty": 1.3}, {"frequency_penalty": 1.0, "temperature": 0.5, "seed": 3, "logprobs": 0},
        {"min_tokens": 4, "stop": range(0, 1200)}, {"bias": ((7, 5.0),)},
    ]  # fmt: skip
    asked = prompts(4)
    jobs = [job(asked[k % 4], **each) for k, each in enumerate(wishes)]
    drawn = jobs[:3]  # without the others, recorded steps propose
    for some in (drawn, jobs):
        with_proposals, without = events(start(), some), events(start(proposals=0), some)
        for mine, theirs in zip(with_proposals, without, strict=True):
            assert [getattr(e, "id", e) for e in mine] == [getattr(e, "id", e) for e in theirs]
            for one, other in zip(mine, theirs):
                if isinstance(one, Token) and one.logprob is not None:
                    assert isinstance(other, Token)
                    # fp32 rounding: products over four tokens at once, or over one
                    assert one.logprob == pytest.approx(other.logprob, abs=2e-5)
                    assert [id for id, _ in one.top] == [id for id, _ in other.top]


def test_sequences_that_are_put_back_say_the_same(model, start: Start):
    engine, asked = start(blocks=20), prompts(8, seed=2)
    plain = model_alone(model)
    assert answers(engine, [job(p) for p in asked]) == [alone(plain, p) for p in asked]
    assert engine.load().evicted > 0, "there was room for all"
    assert engine.load().cache_used == 0


def test_adapters_are_verified_by_their_own_model(moe: Found, model, start: Start, tmp_path: Path):
    adapter = Found(moe.weights, make_adapter(moe.weights, tmp_path / "a", 1))
    tree = with_adapter(model, adapter)
    expected = {"m": model_alone(model), "a": adapter.build()}
    engine = start(models={"m": model, "a": tree})
    jobs = [job(p, name) for p in prompts(2) for name in ("m", "a")]
    assert answers(engine, jobs) == [alone(expected[one.model], list(one.prompt)) for one in jobs]
    assert engine.load().proposed > 0


def test_a_wrong_proposal_that_gives_no_numbers_ends_no_answer(model, start: Start):
    asked, poisoned = prompts(8)[4:], model_alone(model)
    want = [alone(model_alone(model), p) for p in asked]
    said, embed = torch.tensor([id for ids in (*asked, *want) for id in ids]), poisoned.embed_ids
    poisoned.embed_ids = lambda ids: embed(ids).masked_fill(~torch.isin(ids, said)[..., None], torch.nan)
    engine = start(models={"m": poisoned})
    assert answers(engine, [job(p) for p in asked]) == want
    load = engine.load()
    assert load.proposals_held < load.proposed


def test_a_model_that_gives_no_numbers_is_an_error_with_proposals_too(model, start: Start):
    broken = model_alone(model)
    with torch.no_grad():
        broken.norm.weight.fill_(torch.nan)
    end = events(start(models={"m": broken}), [job([3, 4])])[0][-1]
    assert isinstance(end, Done)
    assert end.reason == "error"
