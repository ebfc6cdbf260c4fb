"""Clients that leave, crowds, and a server that is ended while it speaks: rows S3, S4 and S6."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest

from faults.results import fault
from support.clock import until
from support.serving import Live, Program, stopping, tiny_folder

pytestmark = pytest.mark.xdist_group("server")

SEED = int(os.environ.get("FAULT_SEED", "20261115"))
STEP_S = 0.004  # a step of the slowed engine takes at least this


@pytest.fixture(scope="module")
def folder(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(paddle, tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    """A server whose model is as slow as a larger one: clients can then be faster."""
    server = Live(folder, "max_model_len=256", "block_size=8", "max_num_seqs=4", "max_queue=16", "temperature=0")
    (model,) = server.engine.models.values()
    model.layers[0].register_forward_pre_hook(lambda *_: time.sleep(STEP_S))
    yield server
    server.close()


def leave(url: str, luck: random.Random, streams: bool) -> str:
    """Ask for a long answer and hang up; when, by luck: in the queue, at the first token, or later."""
    body = {"prompt": "a story", "max_tokens": 200, "ignore_eos": True, "stream": streams}
    after = luck.choice([0, 0, 1, 3, 10])
    if not streams:
        try:
            httpx.post(url + "/v1/completions", json=body, timeout=luck.uniform(0.02, 0.3))
        except httpx.TimeoutException:
            return "waited for the whole"
        return "too late"
    with httpx.Client(timeout=30) as http, http.stream("POST", url + "/v1/completions", json=body) as answer:
        if answer.status_code == 429:
            return "turned away"
        for k, _ in enumerate(answer.iter_lines()):
            if k >= after:
                return "in mid-stream"
    return "too late"


@pytest.mark.parametrize("count", [32, pytest.param(200, marks=pytest.mark.full)])
def test_a_client_that_leaves_frees_its_place_at_once(live: Live, count: int):
    right = live.chat("hello").json()["choices"][0]["message"]
    luck = random.Random(SEED)
    with fault("S3", f"{count} clients leave at a random moment, 8 at a time") as row:
        row.count = count
        with ThreadPoolExecutor(8) as pool:
            seeds = [random.Random(luck.random()) for _ in range(count)]
            left = Counter(pool.map(lambda k: leave(live.url, seeds[k], k % 4 != 0), range(count)))
        began, before = time.monotonic(), live.engine.load().steps
        assert live.idle(), (SEED, live.engine.load())
        free, steps = time.monotonic() - began, live.engine.load().steps
        row.hits = left["in mid-stream"] + left["waited for the whole"]
        row.note = f"all free {free:.2f} s after the last left"
        assert steps - before < 150, "an answer to its end takes 190 more"
        assert row.hits > count * 0.7, left
        time.sleep(0.2)
        assert live.engine.load().steps == steps, "it went on speaking to nobody"
        assert live.chat("hello").json()["choices"][0]["message"] == right


@pytest.mark.parametrize("count", [96, pytest.param(400, marks=pytest.mark.full)])
def test_a_crowd_gets_right_answers_or_is_told_to_come_back(live: Live, count: int):
    prompts = [f"question {k % 8}" for k in range(count)]
    alone = {prompt: live.chat(prompt).json()["choices"][0]["message"]["content"] for prompt in sorted(set(prompts))}
    gate = threading.Barrier(64)

    def ask(k: int) -> httpx.Response:
        if k < 64:
            gate.wait()
        return live.chat(prompts[k])

    with fault("S4", f"{count} requests of 64 clients at once, a queue of 16, 4 at a time") as row:
        with ThreadPoolExecutor(64) as pool:
            answers = list(pool.map(ask, range(count)))
        seen = Counter(answer.status_code for answer in answers)
        row.count, row.hits = count, seen[429]
        row.note = f"{seen[200]} answered, {seen[429]} told to come back"
        assert set(seen) == {200, 429}
        assert seen[200] >= 20, "the places and the queue at least"
        assert seen[429] > 0
        for prompt, answer in zip(prompts, answers):
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) > 0
                assert answer.json()["error"]["code"] == "queue_full"
            else:
                assert answer.json()["choices"][0]["message"]["content"] == alone[prompt]
        assert live.idle()


def listen(
    url: str,
    lines: list[str],
    begun: threading.Event,
    taken: threading.Semaphore | None = None,
    prompt: str | list[int] = "a story",
) -> None:
    """begun: the first words have come. taken: the server has the request, and has said so."""
    body = {"prompt": prompt, "max_tokens": 500, "ignore_eos": True, "stream": True}
    try:
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as answer:
            if taken is not None:
                taken.release()
            for line in answer.iter_lines():
                if line:
                    lines.append(line)
                    begun.set()
    except httpx.HTTPError as error:
        lines.append(f"cut: {type(error).__name__}")


TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL


@pytest.mark.parametrize("ends", [(TERM,), pytest.param((KILL, INT, TERM, KILL, TERM), marks=pytest.mark.full)])
def test_a_server_asked_to_leave_ends_its_streams_in_words_and_one_killed_frees_its_port(
    folder: Path, ends: tuple[signal.Signals, ...]
):
    words = ("max_model_len=512", "max_num_seqs=2", "drain_timeout=0.1")
    names = ", ".join({TERM: "SIGTERM", INT: "Ctrl-C", KILL: "kill -9"}[number] for number in ends)
    with fault("S6", f"{names} in mid-stream of two clients while six wait; on one port") as row:
        port, longest = 0, 0.0
        for number in ends:
            server = Program(folder, f"port={port}", *words)
            try:
                url = server.ready()
                port = int(url.rpartition(":")[2])
                heard: list[list[str]] = [[] for _ in range(8)]
                begun, taken = threading.Event(), threading.Semaphore(0)
                readers = [threading.Thread(target=listen, args=(url, lines, begun, taken)) for lines in heard]
                for reader in readers:
                    reader.start()
                assert begun.wait(30)
                # A connection that nobody has accepted yet is not the server's to end in words.
                assert all(taken.acquire(timeout=30) for _ in readers)
                row.count += 1
                began = time.monotonic()
                code = server.end(number)
                took = time.monotonic() - began
                longest = max(longest, took)
                for reader in readers:
                    reader.join(30)
                    assert not reader.is_alive(), "its client hangs"
                last = [lines[-1] for lines in heard]
                if number != KILL:
                    assert code == 0, server.text
                    broken = [end for end in last if end != "data: [DONE]"]
                    assert all("the server is stopping" in end for end in broken), broken
                    assert took < 30, "5 s more than drain_timeout at most"
                else:
                    assert code == -KILL
                    broken = [end for end in last if end.startswith("cut: ")]
                assert broken, "nobody was disturbed"
                row.hits += 1
                assert "Traceback" not in server.text
            finally:
                server.close()
        row.note = f"told so within {longest:.1f} s; the port taken again at once"


def test_a_second_signal_ends_streams_in_words_too(folder: Path):
    server = Program(folder, "port=0", "max_model_len=512", "drain_timeout=60")
    try:
        url = server.ready()
        lines: list[str] = []
        begun = threading.Event()
        reader = threading.Thread(target=listen, args=(url, lines, begun))
        reader.start()
        assert begun.wait(30)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: stopping(url))  # two signals that come at once count as one
        answering = reader.is_alive()
        began = time.monotonic()
        code = server.end(signal.SIGTERM)
        assert time.monotonic() - began < 30, "not the 60 s of drain_timeout"
        reader.join(30)
        assert not answering or "the server is stopping" in lines[-1] or lines[-1] == "data: [DONE]"
        assert code == 0, server.text
        assert "Traceback" not in server.text
    finally:
        server.close()


@pytest.mark.parametrize("number", [pytest.param(INT, marks=pytest.mark.full), TERM])
def test_a_server_asked_to_leave_tells_at_once_what_it_finishes_and_ends_when_asked_again(
    folder: Path, number: signal.Signals
):
    """Its engine hangs, so that both answers are open for as long as they may be."""
    script = str(Path(__file__).with_name("stuck_server.py"))
    server = Program(folder, "port=0", "max_model_len=512", "drain_timeout=60", program=(script,))
    try:
        url = server.ready()
        taken = threading.Semaphore(0)
        for _ in range(2):
            threading.Thread(target=listen, args=(url, [], threading.Event(), taken, [7, 8]), daemon=True).start()
        assert all(taken.acquire(timeout=30) for _ in range(2))
        server.process.send_signal(number)
        line = "stopping: finishing 2 answers, for 60 s at most; a second Ctrl-C or SIGTERM ends it now"
        until(lambda: line in server.lines)
        began = time.monotonic()
        server.end(number)
        assert time.monotonic() - began < 30, "not the 60 s of drain_timeout"
        assert server.text.count("stopping: ") == 1
    finally:
        server.close()


def test_a_server_that_gets_signals_to_its_very_end_ends_by_its_exit_code(folder: Path):
    server = Program(folder, "port=0", "max_model_len=512")
    try:
        server.ready()
        while server.process.poll() is None:
            server.process.send_signal(INT)
            time.sleep(0.05)
        assert server.process.returncode == 0, server.text
    finally:
        server.close()


def test_a_server_without_answers_to_finish_leaves_without_a_word_about_them(folder: Path):
    server = Program(folder, "port=0", "max_model_len=512")
    try:
        server.ready()
        assert server.end(INT) == 0, server.text
        assert server.lines[-1] == "stopped"
        assert "stopping" not in server.text
    finally:
        server.close()


@pytest.mark.full
def test_a_short_answer_is_finished_after_sigterm_and_new_ones_are_turned_away(folder: Path):
    server = Program(folder, "port=0", "max_model_len=512", "drain_timeout=60")
    try:
        url = server.ready()
        lines: list[str] = []
        begun = threading.Event()
        reader = threading.Thread(target=listen, args=(url, lines, begun))
        reader.start()
        assert begun.wait(30)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: stopping(url))
        reader.join(60)
        assert lines[-1] == "data: [DONE]"
        assert server.process.wait(30) == 0
    finally:
        server.close()
