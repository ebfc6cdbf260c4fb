"""A long mixed load on a real server process, well-behaved and hostile clients side by side: row S13.

SOAK_S sets its seconds (the full size is 1200), SERVE_DEVICE the device.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx2 as httpx
import pytest

from faults.results import fault
from support.serving import Program, tiny_folder

pytestmark = pytest.mark.xdist_group("server")

SEED = int(os.environ.get("FAULT_SEED", "20261116"))
GROWTH_MB = 48  # of resident memory, from the end of the first quarter to the end: the allocator's rooms, not a leak
SLOWEST_S = 20.0  # for a small request of a well-behaved client, on two busy cores


class Load:
    """What clients do to one server, and what they saw."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.host, _, port = url.removeprefix("http://").partition(":")
        self.port = int(port)
        self.over = threading.Event()
        self.seen: Counter[tuple[str, int]] = Counter()
        self.wrong: list[str] = []
        self.slowest = 0.0
        self.right = ""

    def ask(self, http: httpx.Client, kind: str, path: str, body: object, **options: object) -> httpx.Response:
        answer = http.post(self.url + path, json=body, **options)
        self.seen[kind, answer.status_code] += 1
        return answer

    # --- what one client does, again and again

    def well_behaved(self, http: httpx.Client, luck: random.Random) -> None:
        """Its answers are right at all times."""
        body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 8}
        began = time.monotonic()
        answer = self.ask(http, "good", "/v1/chat/completions", body)
        if answer.status_code == 200:
            self.slowest = max(self.slowest, time.monotonic() - began)
            said = answer.json()["choices"][0]["message"]["content"]
            self.right = self.right or said
            if said != self.right:
                self.wrong.append(said)
        health = http.get(self.url + "/health")
        self.seen["health", health.status_code] += 1
        time.sleep(luck.uniform(0, 0.2))

    def leaves(self, http: httpx.Client, luck: random.Random) -> None:
        body = {"prompt": "a story", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with http.stream("POST", self.url + "/v1/completions", json=body) as answer:
            self.seen["leaves", answer.status_code] += 1
            for k, _ in enumerate(answer.iter_lines()):
                if k >= luck.choice([0, 1, 3, 10]):
                    break

    def greedy(self, http: httpx.Client, luck: random.Random) -> None:
        """Many sequences in one request."""
        body = {"prompt": ["x"] * luck.randint(1, 32), "n": luck.randint(1, 8), "max_tokens": 32, "ignore_eos": True}
        self.ask(http, "greedy", "/v1/completions", body)

    def hostile_prompts(self, http: httpx.Client, luck: random.Random) -> None:
        piece = luck.choice(["</s>", "<|im_end|>", "<", "a", " ", "\u0301", "中", "<mask:1>"])
        text = piece * (luck.choice([100, 10_000, 500_000]) // len(piece))
        many = [{"role": ("user", "assistant")[k % 2], "content": "x"} for k in range(luck.choice([1, 501, 4001]))]
        messages = luck.choice([[{"role": "user", "content": text}], many])
        self.ask(http, "prompts", "/v1/chat/completions", {"messages": messages, "max_tokens": 1})

    def edges(self, http: httpx.Client, luck: random.Random) -> None:
        values: list[float] = [0, 1e-300, 1e-38, 1e-7, 0.5, 1, 2, 10, 1e300]
        body = {"prompt": "x", "max_tokens": 2} | {
            name: luck.choice(values) for name in ("temperature", "top_p", "repetition_penalty", "presence_penalty")
        }
        self.ask(http, "edges", "/v1/completions", body)

    def malformed(self, http: httpx.Client, luck: random.Random) -> None:
        bodies = [
            b"{",
            b"[" * 100_000,
            b'{"messages": 3}',
            bytes(luck.randrange(256) for _ in range(200)),
            b"x" * 10**6,
        ]
        with suppress(httpx.HTTPError):
            kind = {"Content-Type": "application/json", "Host": luck.choice([f"127.0.0.1:{self.port}", "evil.example"])}
            answer = http.post(self.url + "/v1/chat/completions", content=luck.choice(bodies), headers=kind)
            self.seen["malformed", answer.status_code] += 1

    def idles(self, http: httpx.Client, luck: random.Random) -> None:
        """Connections that send nothing, or a header without an end."""
        held = []
        for _ in range(20):
            with suppress(OSError):
                one = socket.create_connection((self.host, self.port), timeout=5)
                one.sendall(luck.choice([b"", b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "]))
                held.append(one)
        self.seen["idles", len(held)] += 1
        self.over.wait(luck.uniform(0, 2))
        for one in held:
            one.close()

    def client(self, act: Callable[[httpx.Client, random.Random], None], luck: random.Random) -> None:
        while not self.over.is_set():
            with httpx.Client(timeout=60) as http:
                for _ in range(10):
                    if self.over.is_set():
                        return
                    try:
                        act(http, luck)
                    except httpx.TransportError as error:
                        self.seen[f"{act.__name__}: {type(error).__name__}", 0] += 1
                        break


def measured(pid: int) -> tuple[float, int, int]:
    """Resident MB, open descriptors, threads."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024, len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"])


@pytest.fixture(scope="module")
def server(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    folder = tiny_folder(paddle, tmp_path_factory.mktemp("served") / "tiny")
    words = ["max_model_len=256", "block_size=8", "max_num_seqs=8", "max_queue=16", "port=0", "drain_timeout=5"]
    program = Program(folder, *words)
    yield program
    program.close()


@pytest.mark.full
def test_a_mixed_load_leaves_memory_descriptors_and_answers_as_they_were(server: Program):
    seconds = float(os.environ.get("SOAK_S", "60"))
    load = Load(server.ready())
    acts = [
        load.well_behaved, load.well_behaved, load.leaves, load.greedy, load.hostile_prompts, load.edges,
        load.malformed, load.idles,
    ]  # fmt: skip
    luck = random.Random(SEED)
    threads = [threading.Thread(target=load.client, args=(act, random.Random(luck.random()))) for act in acts]
    with fault("S13", f"well-behaved and hostile clients side by side for {seconds:.0f} s") as row:
        for thread in threads:
            thread.start()
        samples = []
        for _ in range(8):
            time.sleep(seconds / 8)
            samples.append(measured(server.process.pid))
        load.over.set()
        for thread in threads:
            thread.join(60)
        hostile = sum(n for (kind, _), n in load.seen.items() if kind not in ("good", "health"))
        row.count, row.hits = sum(load.seen.values()), hostile
        growth = samples[-1][0] - samples[1][0]
        good = load.seen["good", 200]
        row.note = (
            f"memory {growth:+.1f} MB after the first quarter; {good} right answers, slowest {load.slowest:.1f} s"
        )
        assert not load.wrong, load.wrong[:3]
        faults = {key: n for key, n in load.seen.items() if key[1] >= 500 and key[1] != 503}
        assert not faults, (faults, server.text[-2000:])
        assert growth < GROWTH_MB, samples
        assert good > seconds, load.seen
        assert load.slowest < SLOWEST_S
        assert load.seen["health", 200] > 0.9 * sum(n for (kind, _), n in load.seen.items() if kind == "health")
        assert len(server.text) < 20_000, server.text[-2000:]
        time.sleep(3)
        after = measured(server.process.pid)
        assert after[1] <= samples[0][1] + 4, ("descriptors", samples, after)
        assert after[2] <= samples[0][2] + 4, ("threads", samples, after)
        assert server.end(signal.SIGTERM, 15) == 0
