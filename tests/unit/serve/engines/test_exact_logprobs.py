"""In exact decoding the log-probabilities of an answer are the trainer's own, bit for bit."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from erniekit.api_load import Found
from erniekit.serve.detokenizer import TextEnd
from erniekit.serve.engines.base import Done, Event, GenerationJob, Token
from erniekit.serve.engines.embedded import EmbeddedEngine, EngineLimits
from erniekit.serve.engines.paged import PagedCache
from erniekit.serve.loaded_models import with_adapter
from support.engine_jobs import LENGTH, alone, job, make_adapter, prompts


def engine_of(models: dict[str, torch.nn.Module], exact: bool = True) -> EmbeddedEngine:
    cache = PagedCache(next(iter(models.values())).config, 64, 4, torch.float32, "cpu")
    return EmbeddedEngine(models, cache, EngineLimits(sequences=4, tokens=16, length=LENGTH, exact=exact))


def events(engine: EmbeddedEngine, jobs: list[GenerationJob]) -> list[list[Event]]:
    async def one(asked: GenerationJob) -> list[Event]:
        return [event async for _, event in engine.submit(asked)]

    async def go() -> list[list[Event]]:
        return list(await asyncio.gather(*map(one, jobs)))

    try:
        return asyncio.run(asyncio.wait_for(go(), 120))
    finally:
        engine.stop()


def trained(model: torch.nn.Module, prompt: tuple[int, ...], answer: list[int]) -> torch.Tensor:
    """A training step's pass over one row, with gradients: prompt and answer, labels of the answer alone."""
    ids = torch.tensor([[*prompt, *answer]])
    labels = ids[:, 1:].clone()
    labels[:, : len(prompt) - 1] = -100
    losses = model.train().requires_grad_(True)(ids[:, :-1], labels=labels, per_token=True)
    assert losses.requires_grad
    return -losses[0, len(prompt) - 1 :].detach()


def test_every_family_and_an_adapter_has_the_trainers_numbers(found: Found, tmp_path: Path):
    adapter = Found(found.weights, make_adapter(found.weights, tmp_path / "a", 1))
    base = found.build()
    asked = [
        job(p, name, temperature=1.0, seed=k, logprobs=0)
        for k, p in enumerate(prompts(3, seed=4))
        for name in ("m", "a")
    ]
    rolled = events(engine_of({"m": base, "a": with_adapter(base, adapter)}), asked)
    plain = {"m": found.build(), "a": adapter.build()}
    for one, said in zip(asked, rolled):
        tokens = [event for event in said if isinstance(event, Token)]
        assert len(tokens) == 12
        expected = trained(plain[one.model], one.prompt, [token.id for token in tokens])
        assert torch.equal(torch.tensor([token.logprob for token in tokens]), expected)


def test_the_token_that_ended_an_answer_is_part_of_the_row(small: Found):
    prompt = [3, 4, 5]
    said = alone(small.build().eval(), prompt)
    stop = said[5]
    (found,) = events(engine_of({"m": small.build()}), [job(prompt, stop=[stop], logprobs=1)])
    tokens = [event for event in found if isinstance(event, Token)]
    assert [token.id for token in tokens] == said[: said.index(stop)]
    assert found[-1] == Done("stop")
    expected = trained(small.build(), tuple(prompt), [*(token.id for token in tokens), stop])
    assert torch.equal(torch.tensor([token.logprob for token in tokens]), expected[:-1])
    assert [dict(token.top)[token.id] for token in tokens] == [token.logprob for token in tokens]


def test_an_answer_that_a_stop_string_ends_is_scored_up_to_its_last_token(small: Found):
    """What comes behind the stop string is neither computed nor part of the row."""
    prompt, tokenizer = [3, 4, 5], small.tokenizer()
    said = alone(small.build().eval(), prompt)
    stop = tokenizer.decode(said[3:5]).strip()
    assert stop
    ends = TextEnd(tokenizer, [stop])
    count = next(k for k, id in enumerate(said) if ends(id)) + 1
    asked = replace(job(prompt, logprobs=0), text_end=partial(TextEnd, tokenizer, [stop]))
    (found,) = events(engine_of({"m": small.build()}), [asked])
    tokens = [event for event in found if isinstance(event, Token)]
    assert (count < 12, [token.id for token in tokens], found[-1]) == (True, said[:count], Done("stop"))
    expected = trained(small.build(), tuple(prompt), said[:count])
    assert torch.equal(torch.tensor([token.logprob for token in tokens]), expected)


def test_a_text_that_cannot_be_read_ends_its_own_request_alone(small: Found, capsys):
    def unreadable(id: int) -> bool:
        raise ValueError("no text")

    asked = [replace(job([3, 4], logprobs=0), text_end=lambda: unreadable), job([3, 4, 5], logprobs=0)]
    broken, other = events(engine_of({"m": small.build()}), asked)
    assert [type(event) for event in broken] == [Done]
    assert broken[0].reason == "error"
    assert (len(other), other[-1]) == (13, Done("length"))
    assert "no text" in capsys.readouterr().err


def test_tokens_are_those_of_the_other_mode_and_without_logprobs_nothing_is_computed_again(small: Found):
    prompt = prompts(1, seed=4)[0]
    (plain,) = events(engine_of({"m": small.build()}), [job(prompt)])
    assert [event.logprob for event in plain[:-1]] == [None] * 12
    asked = job(prompt, logprobs=0)
    (exact,), (other,) = (events(engine_of({"m": small.build()}, one), [asked]) for one in (True, False))
    assert [event.id for event in exact[:-1]] == [event.id for event in other[:-1]]
    pairs = [(one.logprob, two.logprob) for one, two in zip(exact[:-1], other[:-1])]
    assert all(one == pytest.approx(two, abs=2e-5) for one, two in pairs), "fp32 rounding"
