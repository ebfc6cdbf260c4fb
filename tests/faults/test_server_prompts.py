"""Prompts that take long to prepare, and a server that must end although nothing in it does: rows S7 and S8."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx2 as httpx
import pytest

from erniekit.serve import worker_process
from faults.results import fault
from support.clock import comes_true, until
from support.serving import Live, Program, stopping, tiny_folder

pytestmark = pytest.mark.xdist_group("server")

# Renders turn by turn but looks ahead, so every prefix must be rendered; and loops for whoever asks it to.
TEMPLATE = (
    "{% if spin %}{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}"
    "{% endif %}"
    "{% for m in messages %}<mask:1>{{ m.role }}\n{{ m.content }}<|end_of_sentence|>\n"
    "{{ '!' if loop.last and m.role == 'tool' }}{% endfor %}"
    "{% if add_generation_prompt %}<mask:1>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(paddle, tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def live(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    other = tmp_path_factory.mktemp("template") / "tiny"
    shutil.copytree(folder, other)
    (other / "chat_template.jinja").write_text(TEMPLATE)
    server = Live(other, "max_model_len=512", "max_num_seqs=4", "temperature=0")
    yield server
    server.close()
    worker_process.kill_processes()


def talk(turns: int, text: str) -> dict[str, Any]:
    said = [{"role": ("user", "assistant")[k % 2], "content": text} for k in range(turns)]
    return {"messages": [*said, {"role": "user", "content": "go on"}], "max_tokens": 2}


def hostile(size: int, turns: int) -> list[tuple[str, dict[str, Any], set[int]]]:
    """(what, body, the statuses it may get)."""
    refused = {400, 429}
    one = [{"role": "user", "content": "</s>" * (size // 4)}]
    marks = {"x": "<mask:1>" * (size // 8)}
    tool = {"type": "function", "function": {"name": "f", "description": "</s>" * (size // 4)}}
    return [
        ("many messages", talk(turns, "word"), refused),
        ("look-alikes in many messages", talk(turns // 2, "</s>" * (size // turns // 2)), refused),
        ("look-alikes in one message", {"messages": one}, refused),
        ("look-alikes in a tool", {**talk(2, "hi"), "tools": [tool]}, refused),
        (
            "look-alikes in a variable",
            {**talk(2, "hi"), "chat_template_kwargs": marks},
            {200, 429},
        ),
        ("one long word", talk(0, "") | {"messages": [{"role": "user", "content": "a" * size}]}, refused),
        ("a looping template", {**talk(2, "hi"), "chat_template_kwargs": {"spin": True}}, {503, 429}),
        ("a looping template, long", {**talk(90, "hi"), "chat_template_kwargs": {"spin": True}}, {503, 429}),
    ]


def attacked(url: str, size: int, turns: int, times: int) -> None:
    """Short prompts and /health while all hostile requests are in work."""
    attacks = hostile(size, turns) * times
    answers: list[tuple[str, set[int], int]] = []

    def attack(what: str, body: dict[str, Any], allowed: set[int]) -> None:
        answer = httpx.post(url + "/v1/chat/completions", json=body, timeout=120)
        answers.append((what, allowed, answer.status_code))

    def hello() -> Any:
        body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 8}
        return http.post(url + "/v1/chat/completions", json=body).json()["choices"][0]["message"]

    what = f"{len(attacks)} requests of {size // 1000} KB, {turns} messages or a looping template at once"
    with fault("S7", what) as row, httpx.Client(timeout=60) as http:
        right = hello()
        threads = [threading.Thread(target=attack, args=one) for one in attacks]
        for thread in threads:
            thread.start()
        until(lambda: http.get(url + "/health").json()["prompts_running"] >= 2)
        short, health, overlapped = [], [], 0
        while any(thread.is_alive() for thread in threads):
            began = time.monotonic()
            assert hello() == right
            short.append(time.monotonic() - began)
            began = time.monotonic()
            state = http.get(url + "/health")
            health.append(time.monotonic() - began)
            assert state.status_code == 200, state.text
            overlapped += state.json()["prompts_running"] > 0
            time.sleep(0.05)
        row.count = len(attacks)
        row.hits = sum(status != 429 for _, _, status in answers)
        seen = Counter(status for _, _, status in answers)
        row.note = (
            f"{overlapped} short prompts meanwhile, the slowest {max(short):.2f} s, /health {max(health):.2f} s; "
            f"statuses {dict(sorted(seen.items()))}"
        )
        assert len(answers) == len(attacks)
        for what, allowed, status in answers:
            # 503: its time to be prepared was over, where all of these share few cores.
            assert status in allowed | {503}, (what, status)
        assert overlapped > 2
        assert row.hits >= 8
        # Most of them: a machine may stand still for seconds in any one. Behind the hostile ones all would wait.
        assert median(short) < (5 if times == 1 else 10)
        assert median(health) < 2
        assert max(*short, *health) < 25, "none waits for a hostile one to end"
        assert comes_true(lambda: http.get(url + "/health").json()["prompts_running"] == 0)


def test_short_prompts_are_answered_while_eight_hostile_ones_are_in_work(live: Live, monkeypatch: pytest.MonkeyPatch):
    prompts = live.application.app.state.api.prompts
    monkeypatch.setattr(prompts, "limits", replace(prompts.limits, render_s=1.0))
    attacked(live.url, 160_000, 1024, 1)


@pytest.mark.full
@pytest.mark.parametrize(("size", "turns", "times"), [(160_000, 1024, 1), (524_288, 4094, 4)])
def test_a_server_of_its_own_process_holds_out_against_the_full_size(live: Live, size: int, turns: int, times: int):
    server = Program(live.loaded.models["tiny"].folder, "port=0", "max_model_len=512", "temperature=0")
    try:
        attacked(server.ready(), size, turns, times)
        assert server.end(signal.SIGTERM) == 0
    finally:
        server.close()


def test_a_client_that_leaves_while_its_prompt_is_prepared_frees_the_place(live: Live, monkeypatch: pytest.MonkeyPatch):
    prompts = live.application.app.state.api.prompts
    monkeypatch.setattr(prompts, "limits", replace(prompts.limits, render_s=60.0))
    spin = {**talk(90, "hi"), "chat_template_kwargs": {"spin": True}}
    with fault("S7", "clients that leave while a template loops over their long prompt") as row:
        row.count = 4
        for _ in range(row.count // 2):
            threads = [threading.Thread(target=_give_up, args=(live.url, spin)) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            row.hits += 2
        began = time.monotonic()
        fits = live.post("/v1/chat/completions", {**talk(90, ""), "max_tokens": 1})
        row.note = f"the next long prompt was looked at after {time.monotonic() - began:.1f} s"
        assert fits.status_code == 400, "it has too many tokens, which is known when it has been prepared"
        assert time.monotonic() - began < 30, "not the 50 s that are left to the prompts nobody waits for"


def _give_up(url: str, body: dict[str, Any]) -> None:
    with pytest.raises(httpx.TimeoutException):
        httpx.post(url + "/v1/chat/completions", json=body, timeout=0.5)


def _ask(url: str, path: str, body: dict[str, Any], said: list[str]) -> None:
    try:
        with httpx.stream("POST", url + path, json=body, timeout=60) as answer:
            said.append(str(answer.status_code))
            said += [line for line in answer.iter_lines() if line]
    except httpx.HTTPError as error:
        said.append(f"cut: {type(error).__name__}")


@pytest.mark.parametrize("signals", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_server_ends_in_time_though_its_tokenizer_and_its_engine_hang(folder: Path, signals: int):
    """One signal: everybody is told, code 0. A second one: the same at once; code 1 where somebody was not told."""
    drain = 0.5 if signals == 1 else 60
    with fault("S8", f"tokenizer and engine hang for good; {'SIGTERM' if signals == 1 else 'SIGTERM twice'}") as row:
        server = Program(
            folder, "port=0", "max_model_len=256", f"drain_timeout={drain}",
            program=(str(Path(__file__).with_name("stuck_server.py")),),
        )  # fmt: skip
        try:
            url = server.ready()
            heard: list[list[str]] = [[], [], []]
            bodies = [{"prompt": "HANG"}, {"prompt": [7, 8], "stream": True}, {"prompt": [7, 8]}]
            for body, said in zip(bodies, heard):
                threading.Thread(target=_ask, args=(url, "/v1/completions", body, said), daemon=True).start()
            until(lambda: "hangs: tokenizer" in server.text and "hangs: engine" in server.text)
            row.count = row.hits = 2

            def all_in_work() -> bool:
                """The third may hang the engine before the second has been read, which then would be turned away."""
                load = httpx.get(url + "/health").json()
                return (load["prompts_running"], load["running"] + load["waiting"], len(heard[1])) == (1, 2, 1)

            until(all_in_work)
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            if signals == 2:
                until(lambda: stopping(url))  # two signals that come at once count as one
                server.process.send_signal(signal.SIGTERM)
            code = server.process.wait(60)
            took = time.monotonic() - began
            row.note = f"gone after {took:.1f} s, exit code {code}"
            assert took < 30, server.text  # not the 60 s of drain_timeout
            assert code == int(signals == 2 and "answers cut off" in server.text), server.text
            if code == 0:
                until(lambda: len(heard[0]) > 1 and len(heard[1]) > 1 and len(heard[2]) > 1)
                assert (heard[0][0], heard[1][0], heard[2][0]) == ("503", "200", "503")
                assert all("the server is stopping" in said[-1] for said in heard)
        finally:
            server.close()
