"""A server that is sent rubbish answers with an error of the client's and goes on: rows S1, S2 and S5."""

from __future__ import annotations

import json
import os
import random
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest

from erniekit.cli.main import main
from faults.results import fault
from support.serving import Live, tiny_folder

pytestmark = pytest.mark.xdist_group("server")

SEED = int(os.environ.get("FAULT_SEED", "20261115"))
LIMIT, KEY = 64, "a-key-of-the-server"


@pytest.fixture(scope="module")
def folder(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(paddle, tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    server = Live(folder, f"max_model_len={LIMIT}", "block_size=8", "max_new_tokens=4", "temperature=0")
    yield server
    server.close()


GOOD = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}
RUBBISH = [None, True, -1, 0, 1e308, "", "x" * 3000, [], {}, [[]], {"a": {"b": []}}, "\u0000", "﷐", "💥", 2**70, -0.5]


def body(luck: random.Random) -> tuple[str, bytes, str]:
    """(kind, bytes, content type) of one bad, or by accident good, request."""
    kind = luck.choice(["cut", "types", "nested", "huge", "utf8", "numbers", "fields", "content type", "words"])
    text = json.dumps(GOOD).encode()
    sort = "application/json"
    if kind == "cut":
        text = text[: luck.randrange(len(text))]
    elif kind == "types":
        text = json.dumps({**GOOD, luck.choice(list(GOOD)): luck.choice(RUBBISH)}).encode()
    elif kind == "nested":
        deep = luck.choice([63, 64, 65, 500, 20000])
        text = b'{"messages": ' + b"[" * deep + b"]" * luck.choice([deep, 0]) + b"}"
    elif kind == "huge":
        text = json.dumps({**GOOD, "user": "x" * luck.choice([10**5, 10**6, 9 * 10**6])}).encode()
    elif kind == "utf8":
        at = luck.randrange(len(text))
        text = text[:at] + luck.choice([b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\x00", b"\\ud800"]) + text[at:]
    elif kind == "numbers":
        name = luck.choice(["temperature", "top_p", "n", "max_tokens", "top_logprobs", "seed", "frequency_penalty"])
        value = luck.choice(["NaN", "-Infinity", "1e999", "-1", "99999999999999999999", "2.0000001", '"1"'])
        text = text[:-1] + f', "{name}": {value}}}'.encode()
    elif kind == "fields":
        name = luck.choice(
            ["stop", "logit_bias", "tools", "tool_choice", "stream_options", "response_format", "stream"]
        )
        text = json.dumps({**GOOD, name: luck.choice(RUBBISH)}).encode()
    elif kind == "content type":
        sort = luck.choice(
            ["", "text/plain", "application/xml", "multipart/form-data; boundary=x", "application/json; q"]
        )
    else:
        text = bytes(luck.randrange(256) for _ in range(luck.randrange(200)))
    return kind, text, sort


def raw(port: int, text: bytes) -> bytes:
    """What a server says to bytes that may be no HTTP at all."""
    said = b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as link:
        try:
            link.sendall(text)
            link.shutdown(socket.SHUT_WR)
            while part := link.recv(65536):
                said += part
        except OSError:
            pass  # it hung up on us, which is an answer
    return said


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BROKEN = [
    b"\x00\xff\x00\xff\r\n\r\n",
    b"GET\r\n\r\n",
    b"POST /v1/chat/completions HTTP/9.9\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nnonsense\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{\r\n",
    HEAD + b"Content-Length: -5\r\n\r\n{}",
    HEAD + b"Content-Length: 5, 6\r\n\r\n{}",
    HEAD + b"Content-Length: 100\r\n\r\n{}",
    HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    HEAD + b"X-Long: " + b"a" * 200000 + b"\r\n\r\n",
]


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.full)])
def test_no_request_whatsoever_gives_a_server_error_or_leaves_anything_behind(live: Live, count: int):
    luck = random.Random(SEED)
    seen: Counter[int] = Counter()
    kinds: Counter[str] = Counter()
    process = psutil.Process()
    with (
        fault("S1", f"{count} malformed requests: JSON, types, nesting, size, UTF-8, HTTP itself") as row,
        httpx.Client() as http,
    ):
        row.count = count
        start = 0
        for k in range(count):
            if k == count // 4:  # by then every path has been taken once
                start = process.memory_info().rss
            if k % 10 == 0:
                said = raw(live.port, BROKEN[k // 10 % len(BROKEN)])
                status = int(said.split(b" ")[1]) if said.startswith(b"HTTP/") else 400
                kinds["http"] += 1
            else:
                kind, text, sort = body(luck)
                answer = http.post(
                    live.url + "/v1/chat/completions", content=text, headers={"content-type": sort}, timeout=60
                )
                status = answer.status_code
                kinds[kind] += 1
                assert status == 200 or set(answer.json()["error"]) == {"message", "type", "param", "code"}, text[:200]
            seen[status] += 1
            assert status < 500, (SEED, k)
        grown = (process.memory_info().rss - start) / 2**20
        row.hits = sum(number for status, number in seen.items() if status >= 400)
        row.note = f"statuses {dict(sorted(seen.items()))}, memory {grown:+.1f} MB"
        assert len(kinds) == 10
        assert row.hits > count // 2
        assert grown < 20
        assert httpx.get(live.url + "/health").json()["status"] == "ok"
        assert live.idle()


def test_a_prompt_may_fill_the_context_to_the_last_token_and_not_more(live: Live):
    with fault("S2", "prompts of limit-1, limit, limit+1 and 100 x the limit, two routes") as row:
        for path, wrap in (
            ("/v1/completions", lambda n: {"prompt": [5] * n, "max_tokens": 1}),
            ("/v1/completions", lambda n: {"prompt": [5] * (n - 3), "max_tokens": 4}),
        ):
            for size, status in ((LIMIT - 2, 200), (LIMIT - 1, 200), (LIMIT, 400), (100 * LIMIT, 400)):
                answer = live.post(path, wrap(size))
                assert answer.status_code == status, size
                if status == 400:
                    assert answer.json()["error"]["code"] == "context_length_exceeded"
                row.count += 1
                row.hits += 1
        long = live.chat("word " * 100 * LIMIT)
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
        full = live.post("/v1/completions", {"prompt": [5] * (LIMIT - 1), "ignore_eos": True})
        assert full.json()["usage"]["total_tokens"] == LIMIT, (
            "an answer without a limit of its own ends with the context"
        )


def test_only_who_has_the_key_gets_in_and_nobody_listens_to_strangers_without_one(folder: Path, capsys):
    server = Live(folder, f"max_model_len={LIMIT}", "max_new_tokens=2", key=KEY)
    cases = {
        "none": ({}, 401),
        "empty": ({"Authorization": ""}, 401),
        "no scheme": ({"Authorization": KEY}, 401),
        "basic": ({"Authorization": f"Basic {KEY}"}, 401),
        "wrong": ({"Authorization": "Bearer wrong"}, 401),
        "a part": ({"Authorization": f"Bearer {KEY[:-1]}"}, 401),
        "more": ({"Authorization": f"Bearer {KEY}x"}, 401),
        "other case": ({"Authorization": f"Bearer {KEY.upper()}"}, 401),
        "not ascii": ({"Authorization": b"Bearer \xff\xfe"}, 401),
        "right": ({"Authorization": f"Bearer {KEY}"}, 200),
        "right, header in lower case": ({"authorization": f"bearer {KEY}"}, 200),
    }
    try:
        with fault("S5", "keys: none, wrong, nearly right, right; an address for everybody without a key") as row:
            for name, (headers, status) in cases.items():
                for path in ("/v1/models", "/metrics"):
                    answer = httpx.get(server.url + path, headers=headers)
                    assert answer.status_code == status, name
                row.count += 1
                row.hits += 1
            assert answer.status_code == 200
            refused = httpx.get(server.url + "/v1/models")
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
            assert httpx.get(server.url + "/health").status_code == 200, "load balancers have no key"
            assert server.client(KEY).models.list().data
            assert KEY not in refused.text
            for host in ("0.0.0.0", "::", "192.0.2.1"):
                assert main(["server", str(folder), f"host={host}"]) == 2
                assert "no key is set" in capsys.readouterr().err
                row.count += 1
                row.hits += 1
    finally:
        server.close()
