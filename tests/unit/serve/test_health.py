"""Health says what hangs, and that it no longer does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from erniekit.serve import health
from erniekit.serve.engines.base import Load
from erniekit.serve.health import HealthMonitor
from erniekit.serve.prompt_work import PromptLimits, PromptWork
from support.clock import PATIENCE_S


class Engine:
    now = Load()

    def load(self) -> Load:
        return self.now


def watched(
    test: Callable[[HealthMonitor, Engine], Awaitable[None]], monkeypatch, stall_s: float, lag_s: float
) -> None:
    monkeypatch.setattr(health, "EVERY_S", 0.02)

    async def main() -> None:
        engine = Engine()
        watch = HealthMonitor(engine, PromptWork(PromptLimits()), stall_s, lag_s)
        watch.start()
        await test(watch, engine)

    asyncio.run(main())


def test_an_engine_with_work_and_without_steps_is_ill_until_it_steps(monkeypatch):
    async def test(watch: HealthMonitor, engine: Engine) -> None:
        engine.now = Load(running=1, steps=5)
        assert watch.reason(engine.now) is None
        await asyncio.sleep(0.6)
        assert "no step for" in (watch.reason(engine.now) or "")
        engine.now = Load(running=1, steps=6)
        assert watch.reason(engine.now) is None
        engine.now = Load(running=0, steps=6)
        await asyncio.sleep(0.6)
        assert watch.reason(engine.now) is None, "nothing to do is no hang"
        assert watch.reason(Load(healthy=False)) == "the engine fails"

    watched(test, monkeypatch, stall_s=0.3, lag_s=60)  # a machine that stands still is not the matter here


def test_an_event_loop_that_is_held_up_is_told_for_a_while(monkeypatch):
    monkeypatch.setattr(health, "LAG_KEPT_S", 0.3)

    async def test(watch: HealthMonitor, engine: Engine) -> None:
        await asyncio.sleep(0.05)
        time.sleep(0.5)  # in the event loop's own thread, as a careless route would
        await asyncio.sleep(0.05)
        assert "event loop was held up" in (watch.reason(engine.now) or "")
        assert watch.lag > 0.3
        end = time.monotonic() + PATIENCE_S
        while watch.reason(engine.now) is not None:  # other work on this machine may hold it up once more
            assert time.monotonic() < end
            await asyncio.sleep(0.05)

    watched(test, monkeypatch, stall_s=60, lag_s=0.2)
