"""Requests of every kind at once, of random make: recorded steps say what plain ones say to each alone, whoever ends at
its first token, disconnects there or is put back; nothing of them is left."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
import torch

from erniekit.api_load import Found
from erniekit.devices import pick
from erniekit.serve.engines import scheduling
from erniekit.serve.engines.base import Done, GenerationJob, Token
from erniekit.serve.engines.embedded import EmbeddedEngine, EngineLimits
from erniekit.serve.engines.paged import PagedCache
from support.engine_jobs import LENGTH, answers, job

SLOTS = 3


def engine_of(found: Found, recorded: bool, blocks: int, **limits: int) -> EmbeddedEngine:
    model = found.build()
    cache = PagedCache(model.config, blocks, 4, torch.float32, "cpu")
    asked = EngineLimits(**{"sequences": SLOTS, "tokens": 16, "length": LENGTH, **limits})
    return EmbeddedEngine({"m": model}, cache, asked, pick("cpu", False) if recorded else None)


def made(rng: random.Random) -> GenerationJob:
    prompt = [rng.randrange(5, 1000) for _ in range(rng.randrange(1, rng.choice([4, 40])))]
    wishes: dict[str, float] = {"max_tokens": rng.choice([1, 1, 2, 12, 20])}
    wishes |= rng.choice([{}, {}, {}, {"temperature": 1.0, "seed": rng.randrange(1 << 60)}])
    wishes |= rng.choice([{}, {}, {}, {}, {}, {"logprobs": 0}, {"frequency_penalty": 0.7}])
    return job(prompt, **wishes)


async def heard(engine: EmbeddedEngine, jobs: list[GenerationJob], leaves: bool) -> list[list[int]]:
    """What each of a request's jobs said; leaves: the client disconnects at the first token of all."""
    said: list[list[int]] = [[] for _ in jobs]
    ended: set[int] = set()
    stream = engine.submit(*jobs)
    async for number, event in stream:
        assert number not in ended, "something came behind an end"
        if isinstance(event, Token):
            said[number].append(event.id)
        elif isinstance(event, Done):
            assert event.reason != "error", event
            ended.add(number)
        if leaves:
            engine.cancel(stream)
            break
    return said


async def all_free(engine: EmbeddedEngine) -> None:
    while (load := engine.load()).running or load.waiting or load.cache_used or engine._launched:
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("seed", range(4))
def test_answers_in_any_company_are_those_of_plain_steps(small: Found, seed: int, monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(seed)
    monkeypatch.setattr(scheduling, "BURST_S", rng.choice([60.0, 0.012, 0.0]))
    requests = [[made(rng) for _ in range(rng.choice([1, 1, 1, 3]))] for _ in range(12)]
    plain = engine_of(small, False, 64)
    try:
        jobs = [one for jobs in requests for one in jobs]
        said = dict(zip(jobs, answers(plain, jobs, together=False)))
    finally:
        plain.stop()
    expected = [[said[one] for one in jobs] for jobs in requests]
    for jobs, wanted in zip(requests, expected):
        if rng.random() < 0.3:  # what would come is not said: the first token, or a later one, ends it
            at = rng.choice([0, len(wanted[0]) - 1])
            jobs[0] = replace(jobs[0], stop_ids=frozenset([wanted[0][at]]))
            wanted[0] = wanted[0][: wanted[0].index(wanted[0][at])]
    leaving = [rng.random() < 0.2 for _ in requests]
    engine = engine_of(small, True, 18, burst=rng.choice([1, 4]))

    async def go() -> list[list[list[int]]]:
        found = await asyncio.gather(*(heard(engine, jobs, leaves) for jobs, leaves in zip(requests, leaving)))
        await all_free(engine)
        return found

    try:
        for found, wanted, leaves in zip(asyncio.run(asyncio.wait_for(go(), 120)), expected, leaving):
            whole = [(one[: len(f)] if leaves else one) for f, one in zip(found, wanted)]
            assert found == whole
        assert engine.recorded is not None
        assert sorted(engine.recorded.state.free) == list(range(SLOTS))
    finally:
        engine.stop()
