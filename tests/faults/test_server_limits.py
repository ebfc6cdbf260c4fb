"""Clients that hold connections, take every place, send numbers at the edges or come by a foreign name: S9 to S12."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx2 as httpx
import pytest

from erniekit.net.connections import ConnectionLimits
from faults.results import fault
from support.clock import until
from support.serving import Live, Program, tiny_folder

pytestmark = pytest.mark.xdist_group("server")

STEP_S = 0.003


@pytest.fixture(scope="module")
def folder(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(paddle, tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    """Steps are as slow as a larger model's: one client can then keep it busy. Readers may stall for a second."""
    server = Live(
        folder, "max_model_len=256", "block_size=8", "max_num_seqs=4", "max_queue=64",
        limits=ConnectionLimits(stalled_s=1.0, most=64),
    )  # fmt: skip
    (model,) = server.engine.models.values()
    model.layers[0].register_forward_pre_hook(lambda *_: time.sleep(STEP_S))
    yield server
    server.close()


def is_open(link: socket.socket) -> bool:
    link.setblocking(False)
    try:
        return link.recv(4096) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@pytest.mark.parametrize("wait_s", [0, pytest.param(34, marks=pytest.mark.full)])
def test_a_request_comes_through_between_idle_connections_with_few_descriptors(folder: Path, wait_s: int):
    what = "200 idle connections and slow headers, 128 descriptors" + (", to their deadline" if wait_s else "")
    with fault("S9", what) as row, ExitStack() as stack:
        server = Program(folder, "port=0", "max_model_len=64", descriptors=128)
        stack.callback(server.close)
        url = server.ready()
        port = int(url.rpartition(":")[2])
        links: list[socket.socket] = []
        took = 0.0
        for k in range(200):
            link = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            if k % 2:
                link.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
            links.append(link)
            if k % 50 == 49:
                began = time.monotonic()
                body = {"prompt": [5, 6], "max_tokens": 2, "temperature": 0}
                assert httpx.post(url + "/v1/completions", json=body, timeout=30).status_code == 200
                took = max(took, time.monotonic() - began)
        row.count = len(links)
        left = sum(map(is_open, links))
        row.hits = len(links) - left
        assert left < 128 - 32, "more than there were descriptors for"
        assert left >= 20, "those that fit may stay until their deadline"
        assert took < 25, "2 s, and more where other work shares the cores; not the 30 s that the others may stay"
        if wait_s:
            end = time.monotonic() + wait_s
            while time.monotonic() < end:  # a byte now and then keeps no connection open
                for link in links[1::2]:
                    try:
                        link.send(b"a")
                    except OSError:
                        pass
                time.sleep(1)
            assert sum(map(is_open, links)) == 0
            assert httpx.get(url + "/health", timeout=30).status_code == 200
        assert len(server.text) < 10_000
        row.note = f"a request answered within {took:.1f} s, a log of {len(server.text)} bytes"


def test_a_reader_that_stalls_is_cut_off_and_costs_nobody_anything(live: Live):
    with fault("S9", "clients that ask for much and read nothing of it") as row, ExitStack() as stack:
        text = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 700
        links = []
        for _ in range(2):
            link = socket.socket()
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.connect(("127.0.0.1", live.port))
            links.append(stack.enter_context(link))
            threading.Thread(target=_send, args=(link, text), daemon=True).start()
        shared = live._socket.shared  # type: ignore[attr-defined]
        stalled: set[object] = set()  # the first may be cut off before the last has begun
        until(
            lambda: stalled.update(one for one in list(shared.open) if one.unsent) or len(stalled) == len(links),
            seconds=60,
        )
        row.count = row.hits = len(links)
        began = time.monotonic()
        assert live.chat().status_code == 200
        until(lambda: not any(one.unsent for one in list(shared.open)))  # nobody reads: for ever otherwise
        row.note = f"cut off within {time.monotonic() - began:.1f} s; 1 s is the limit here"


def _send(link: socket.socket, text: bytes) -> None:
    try:
        link.sendall(text)
    except OSError:
        pass


def from_address(address: str) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=60)


@pytest.mark.parametrize("clients", [20, pytest.param(100, marks=pytest.mark.full)])
def test_small_requests_are_answered_while_one_client_has_asked_for_everything(live: Live, clients: int):
    ask = {"prompt": "hello", "max_tokens": 6, "temperature": 0}
    right = live.post("/v1/completions", ask).json()["choices"]
    greedy = {"prompt": [f"story {k}" for k in range(32)], "max_tokens": 200, "ignore_eos": True, "stream": True}
    too_many = live.post("/v1/completions", {**greedy, "n": 8})
    assert (too_many.status_code, too_many.json()["error"]["param"]) == (422, "prompt")
    with fault("S10", f"128 sequences of 200 tokens of one client, 4 places, {clients} other clients") as row:
        with (
            from_address("127.0.0.99") as http,
            http.stream("POST", live.url + "/v1/completions", json={**greedy, "n": 4}) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            lines = answer.iter_lines()  # held: its end would close the response
            next(lines)
            before = live.engine.load().preempted

            def turn(k: int) -> tuple[float, object]:
                # Every fourth has the large request's own address, as behind a proxy.
                with from_address("127.0.0.99" if k % 4 == 0 else f"127.0.1.{k + 1}") as other:
                    began = time.monotonic()
                    answer = other.post(live.url + "/v1/completions", json=ask)
                    return time.monotonic() - began, (answer.status_code, answer.json()["choices"])

            with ThreadPoolExecutor(8) as pool:
                turns = list(pool.map(turn, range(clients)))
            load = live.engine.load()
            row.count = row.hits = clients
            assert load.waiting > 60, "the large request was over before they were"
            assert [said for _, said in turns] == [(200, right)] * clients
            assert load.preempted > before
            row.note = f"answered within {max(took for took, _ in turns):.1f} s, {load.waiting} still waiting"
        assert live.idle()


EDGES = [0, 5e-324, 1e-300, 1e-45, 1.2e-38, 1e-10, 1e-5, 1.0, 2**-23, 1 - 2**-24]
VALUES: dict[str, list[object]] = {
    "temperature": [*EDGES, 2, 2.0000001, -5e-324],
    "top_p": [*EDGES, 1.0000001],
    "top_k": [-1, 0, 1, 2**31 - 1, 2**31],
    "repetition_penalty": [*EDGES, 0.01, 10, 10.1, 1e300],
    "frequency_penalty": [*EDGES, -2, 2, 1e308],
    "presence_penalty": [*EDGES, -2, 2, -1e308],
    "logit_bias": [{"5": value} for value in (*EDGES, -100, 100, 1e38)],
    "seed": [0, -(2**63), 2**63 - 1, 2**63],
    "min_tokens": [0, 1, 2**31 - 1, 2**31],
    "top_logprobs": [0, 20, 21],
}


@pytest.mark.parametrize("pairs", [40, pytest.param(600, marks=pytest.mark.full)])
def test_a_number_at_its_edge_is_answered_or_refused_and_the_engine_stays_healthy(live: Live, pairs: int):
    luck = random.Random(7)
    cases: list[dict[str, object]] = [{name: value} for name, values in VALUES.items() for value in values]
    for _ in range(pairs):
        cases.append({name: luck.choice(values) for name, values in VALUES.items() if luck.random() < 0.5})
    seen: Counter[int] = Counter()
    with fault("S11", f"every sampling field at its edges, and {pairs} mixtures") as row:
        row.count = len(cases)
        for case in cases:
            # Hot, so that every other field has something to choose from.
            answer = live.chat("hi", **{"temperature": 1.3, "max_tokens": 2, "n": 2, **case})
            assert answer.status_code in (200, 422), (case, answer.text)
            if answer.status_code == 422:
                assert answer.json()["error"]["param"].partition(".")[0] in case
            else:
                json.loads(answer.text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
            seen[answer.status_code] += 1
        row.hits, row.note = len(cases), f"statuses {dict(sorted(seen.items()))}"
        assert seen[422] >= 15
        assert seen[200] >= 60
        assert httpx.get(live.url + "/health").status_code == 200
        assert live.idle()


FOREIGN = [
    {"Host": "evil.example"},
    {"Host": "evil.example:8188"},
    {"Host": "127.0.0.1.nip.io"},
    {"Host": "localhost.evil.example"},
    {"Host": "10.0.0.5"},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://localhost:1"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
]


def test_a_foreign_name_or_page_gets_nothing_of_a_server_without_a_key(live: Live, folder: Path):
    ask = {"prompt": "hello", "max_tokens": 2}
    with fault("S12", "foreign Host, Origin and fetch headers, each to four routes") as row:
        steps = live.engine.load().steps
        for headers in FOREIGN:
            answers = [
                live.http.get(live.url + path, headers=headers) for path in ("/v1/models", "/metrics", "/nothing")
            ]
            answers.append(live.http.post(live.url + "/v1/completions", json=ask, headers=headers))
            for answer in answers:
                row.count += 1
                assert answer.status_code == 403, headers
                assert answer.json()["error"]["code"] == ("foreign_host" if "Host" in headers else "foreign_origin")
                assert "access-control-allow-origin" not in answer.headers
                row.hits += 1
        assert live.engine.load().steps == steps, "nothing was computed for them"
        row.note = "403 each time"
    for host in ("localhost", "LOCALHOST:9", "[::1]:8188", "127.0.0.2", f"127.0.0.1:{live.port}"):
        assert live.post("/v1/completions", ask, headers={"Host": host}).status_code == 200, host
    own = {"Host": "localhost:7", "Origin": "http://localhost:7"}
    assert live.post("/v1/completions", ask, headers=own).status_code == 200
    assert live.http.get(live.url + "/health", headers={"Host": "10.0.0.5"}).status_code == 200, (
        "a load balancer's check"
    )
    assert live.http.get(live.url + "/health", headers={"Host": "evil.example"}).status_code == 403
    assert live.http.options(live.url + "/v1/completions").status_code == 405, "there is no CORS"
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as link:
        link.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 OK" in link.recv(4096), "HTTP/1.0 has no Host"


def test_names_given_by_hand_and_a_key_open_the_server_to_other_names(folder: Path):
    for words, key in ((("server_names=gpu.lan, other.lan",), None), ((), "secret")):
        server = Live(folder, "max_model_len=64", *words, key=key)
        try:
            headers = {"Host": "gpu.lan", **({"Authorization": f"Bearer {key}"} if key else {})}
            assert httpx.get(server.url + "/v1/models", headers=headers).status_code == 200
            foreign = httpx.get(server.url + "/v1/models", headers={**headers, "Host": "evil.example"})
            assert foreign.status_code == (200 if key else 403)
        finally:
            server.close()
