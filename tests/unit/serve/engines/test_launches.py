"""In what order recorded steps are launched and read, how many at a time, and when tokens are delivered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from erniekit.api_load import Found
from erniekit.serve.engines import embedded, scheduling
from erniekit.serve.engines.base import Token
from erniekit.serve.engines.embedded import EmbeddedEngine
from erniekit.serve.engines.launched import LaunchedStep
from erniekit.serve.engines.recorded import RecordedSteps
from support.engine_jobs import answers, engine_of, job


@pytest.fixture
def engine(small: Found) -> Iterator[EmbeddedEngine]:
    made = engine_of({"m": small.build()})
    yield made
    made.stop()


def test_a_burst_is_launched_before_the_one_in_front_of_it_is_read(engine: EmbeddedEngine, monkeypatch):
    """Steps and reads in the order they happen: of one client alone, bursts of several tokens, one ahead."""
    monkeypatch.setattr(scheduling, "BURST_S", 60.0)
    order: list[str] = []
    launch, read = RecordedSteps.launch, EmbeddedEngine._read

    def launching(self, name, group, steps):
        order.append(f"launch {steps}")
        return launch(self, name, group, steps)

    def reading(self, launched):
        order.append("read")
        return read(self, launched)

    monkeypatch.setattr(RecordedSteps, "launch", launching)
    monkeypatch.setattr(EmbeddedEngine, "_read", reading)
    assert len(answers(engine, [job([3, 4], max_tokens=12)])[0]) == 12
    assert order == ["launch 1", "launch 4", "read", "launch 4", "read", "launch 3", "read", "read"]


def test_a_burst_of_slow_steps_is_short_so_that_prompts_do_not_wait_for_it(engine: EmbeddedEngine, monkeypatch):
    steps, launch, read = [], RecordedSteps.launch, LaunchedStep.read

    def launching(self, name, group, count):
        steps.append(count)
        return launch(self, name, group, count)

    def reading(self):
        time.sleep(0.02 * self.steps)
        return read(self)

    monkeypatch.setattr(RecordedSteps, "launch", launching)
    monkeypatch.setattr(LaunchedStep, "read", reading)
    monkeypatch.setattr(scheduling, "BURST_S", 0.012)
    answers(engine, [job([3, 4], max_tokens=14)])
    assert steps[:3] == [1, 4, 4], "two are launched before it is known how long steps take"
    assert set(steps[3:]) == {1}


def test_a_first_token_is_delivered_before_the_tokens_of_others_are_read(engine: EmbeddedEngine, monkeypatch):
    order: list[str] = []
    firsts, read, put = LaunchedStep.read_firsts, LaunchedStep.read, embedded.deliver

    def reading_firsts(self):
        found = firsts(self)
        order.extend(["first"] * len(found))
        return found

    def reading(self):
        order.append("read")
        return read(self)

    def delivering(events):
        order.append("deliver") if events else None
        put(events)

    monkeypatch.setattr(LaunchedStep, "read_firsts", reading_firsts)
    monkeypatch.setattr(LaunchedStep, "read", reading)
    monkeypatch.setattr(embedded, "deliver", delivering)
    jobs = [job([3, 4], max_tokens=40), job([5, 6, 7], max_tokens=3)]

    async def one_after_the_other() -> list[list[int]]:
        first = engine.submit(jobs[0])
        begun = await _first_id(first)
        second = asyncio.create_task(_ids(engine.submit(jobs[1])))
        return [[begun, *await _ids(first)], await second]

    told = asyncio.run(one_after_the_other())
    at = order.index("first")
    assert order[at : at + 3] == ["first", "deliver", "read"], "the second client's, beside the first one's steps"
    assert told == answers(engine, jobs, together=False)


async def _first_id(stream) -> int:
    _, event = await stream.events.get()
    assert isinstance(event, Token)
    return event.id


async def _ids(stream) -> list[int]:
    return [event.id async for _, event in stream if isinstance(event, Token)]
