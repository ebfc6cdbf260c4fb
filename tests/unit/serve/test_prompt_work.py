"""The lanes of prompt work: who waits for whom, what is turned away, what a deadline and a client's leaving do."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from erniekit.serve.prompt_work import PromptLimits, PromptWork, is_short
from erniekit.serve.prompt_worker import ChatPrompt, Failed, PromptTask, TextPrompts, prepare
from erniekit.serve.work_queue import Busy, Late, Stuck
from support.clock import PATIENCE_S

MANY = "{% for b in range(99999) %}{% set c = b %}{% endfor %}"
SPIN = "{% if spin %}{% for a in range(99999) %}" + MANY + "{% endfor %}{% endif %}"
LONG, SHORT = TextPrompts(["a long prompt " * 2000], None), TextPrompts(["short"], None)


@pytest.fixture
def tokenizer(paddle: Path, tmp_path: Path) -> Tokenizer:
    shutil.copytree(paddle / "tokenizer", tmp_path / "t")
    tokenizer = load_tokenizer(tmp_path / "t")
    tokenizer.chat_template = SPIN + "{% for m in messages %}{{ m.content }}{% endfor %}"
    return tokenizer


@pytest.fixture
def held(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, a text with HOLD in it is not encoded in this process."""
    let_go, real = threading.Event(), tokenizer._encode_runs

    def encode(runs: Any) -> Any:
        if any("HOLD" in text for text, _ in runs):
            let_go.wait(30)
        return real(runs)

    monkeypatch.setattr(tokenizer, "_encode_runs", encode)
    yield let_go
    let_go.set()


def run(limits: PromptLimits, test: Callable[[PromptWork], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        work = PromptWork(limits)
        try:
            return await test(work)
        finally:
            work.end()

    return asyncio.run(main())


async def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def test_short_prompts_stay_in_this_process_and_long_ones_leave_it_with_the_same_ids(tokenizer: Tokenizer):
    said = [{"role": "user", "content": "hello 山 </s>"}] * 70
    kinds = [SHORT, LONG, ChatPrompt(said[:3], None, {}), ChatPrompt(said, None, {"x": [1, None]})]
    assert [is_short(what) for what in kinds] == [True, False, True, False]

    async def test(work: PromptWork) -> list[Any]:
        out = [await work.ids(what, tokenizer, 10**6, 60) for what in kinds]
        assert len(work._processes) == 1
        return out

    assert run(PromptLimits(), test) == [prepare(PromptTask(what, 10**6, 5), tokenizer) for what in kinds]


def test_a_process_says_why_there_are_no_ids_and_sees_that_the_files_are_others(tokenizer: Tokenizer):
    async def test(work: PromptWork) -> None:
        long = await work.ids(LONG, tokenizer, 50, 60)
        assert (long.kind, long.tokens > 50) == ("too long", True)
        tokenizer.chat_template = "{{ raise_exception('no ' + messages[0].role) }}"
        refused = await work.ids(ChatPrompt([{"role": "user", "content": "a" * 20_000}], None, {}), tokenizer, 50, 60)
        assert refused == Failed("refused", "the chat template refuses it: no user")
        with (tokenizer.folder / "tokenizer_config.json").open("a") as file:
            file.write(" ")
        (tokenizer.folder / "special_tokens_map.json").write_text('{"eos_token": "<s>"}')
        (tokenizer.folder / "tokenizer_config.json").unlink()
        tokenizer.chat_template = None
        assert (await work.ids(LONG, tokenizer, 50, 60)).kind == "changed"

    run(PromptLimits(), test)


def test_at_the_deadline_a_process_is_killed_and_the_next_prompt_gets_a_new_one(tokenizer: Tokenizer):
    spin = ChatPrompt([{"role": "user", "content": "x" * 20_000}], None, {"spin": True})

    async def test(work: PromptWork) -> None:
        await work.ids(LONG, tokenizer, 10**6, 60)
        first = work._processes[0]._child.pid
        with pytest.raises(Late):
            await work.ids(spin, tokenizer, 10**6, 0.5)
        assert work.abandoned == 1
        assert isinstance(await work.ids(LONG, tokenizer, 10**6, 60), list)
        assert first not in [one._child.pid for one in work._processes if one._child is not None]
        await until(lambda: work.load().running == 0)  # the thread of the one that was killed comes back too
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)

    run(PromptLimits(processes=1, render_s=30), test)


def test_a_template_that_takes_its_time_over_a_short_prompt_is_given_to_a_process(tokenizer: Tokenizer):
    spin = ChatPrompt([{"role": "user", "content": "x"}], None, {"spin": True})

    async def test(work: PromptWork) -> None:
        found = await work.ids(spin, tokenizer, 10**6, 60)
        assert found.kind == "slow"
        assert len(work._processes) == 1

    run(PromptLimits(short_render_s=0.05, render_s=0.1), test)


def test_a_full_queue_turns_away_and_who_leaves_makes_room(tokenizer: Tokenizer, held: threading.Event):
    hold = TextPrompts(["HOLD"], None)

    async def test(work: PromptWork) -> None:
        tasks = [asyncio.ensure_future(work.ids(hold, tokenizer, 99, 60)) for _ in range(3)]
        await until(lambda: (work.load().running, work.load().waiting) == (1, 2))
        with pytest.raises(Busy):
            await work.ids(SHORT, tokenizer, 99, 60)
        tasks[2].cancel()
        await until(lambda: work.load().waiting == 1)
        after = asyncio.ensure_future(work.ids(SHORT, tokenizer, 99, 60))
        await until(lambda: work.load().waiting == 2)
        held.set()
        assert isinstance(await after, list)
        assert work.load().waiting == 0

    run(PromptLimits(threads=1, short_queue=2), test)


def test_threads_that_do_not_come_back_are_replaced_then_refused_and_taken_back(
    tokenizer: Tokenizer, held: threading.Event
):
    hold = TextPrompts(["HOLD"], None)

    async def test(work: PromptWork) -> None:
        for lost in (1, 2):
            for _ in range(20):
                with pytest.raises(Late):
                    await work.ids(hold, tokenizer, 99, 0.1)
                if work.load().lost == lost:  # else no thread had begun it by then
                    break
            assert (work.load().lost, work.load().stuck) == (lost, True)
            if lost == 1:
                assert isinstance(await work.ids(SHORT, tokenizer, 99, 60), list), "another thread has taken over"
        with pytest.raises(Stuck):
            await work.ids(SHORT, tokenizer, 99, 60)
        held.set()
        while work.load().lost:
            await asyncio.sleep(0.01)
        assert isinstance(await work.ids(SHORT, tokenizer, 99, 60), list)
        while len(work._short.slots) > 1:
            await asyncio.sleep(0.01)
        assert not work.load().stuck

    run(PromptLimits(threads=1), test)


def test_the_end_tells_everybody_who_waits(tokenizer: Tokenizer, held: threading.Event):
    async def test(work: PromptWork) -> None:
        tasks = [asyncio.ensure_future(work.ids(TextPrompts(["HOLD"], None), tokenizer, 99, 60)) for _ in range(3)]
        await until(lambda: (work.load().running, work.load().waiting) == (1, 2))
        began = time.monotonic()
        work.end()
        assert [(await task).kind for task in tasks] == ["stopping"] * 3
        assert time.monotonic() - began < 30, "at once, not at their deadline of 60 s"

    run(PromptLimits(threads=1), test)
