"""Bodies that are small to send and large to read: the event loop waits for whoever parses them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from erniekit.serve import middleware
from erniekit.serve.metrics import Metrics
from erniekit.serve.request_error import RequestError
from erniekit.serve.schema import ChatRequest, CompletionRequest, GenerationRequest
from support.clock import within

PART = b'{"type":"text","text":""}'


def repeated(item: bytes, before: bytes, after: bytes, size: int = middleware.MAX_BODY_BYTES) -> bytes:
    count = (size - len(before) - len(after)) // (len(item) + 1)
    return before + b",".join([item] * count) + after


BODIES: dict[str, tuple[type[GenerationRequest], bytes]] = {
    "numbers": (CompletionRequest, repeated(b"1", b'{"prompt":[', b"]}")),
    "texts": (CompletionRequest, repeated(b'""', b'{"prompt":[', b"]}")),
    "lists": (CompletionRequest, repeated(b"[]", b'{"prompt":"","x":[', b"]}")),
    "messages": (ChatRequest, repeated(b"{}", b'{"messages":[', b"]}")),
    "parts": (ChatRequest, repeated(PART, b'{"messages":[{"role":"user","content":[', b"]}]}")),
    "calls": (ChatRequest, repeated(b'{"a":1}', b'{"messages":[{"role":"assistant","tool_calls":[', b"]}]}")),
    "fields": (ChatRequest, b"{" + b",".join(b'"%d":1' % n for n in range(600_000)) + b"}"),
}


def read(body: bytes, kind: type[GenerationRequest], **headers: str) -> Any:
    async def stream() -> AsyncIterator[bytes]:
        yield body

    request: Any = SimpleNamespace(headers={"content-type": "application/json", **headers}, stream=stream)
    return asyncio.run(middleware.read_json(request, kind))


@pytest.mark.parametrize("name", BODIES)
def test_a_body_of_millions_of_values_is_refused_before_it_is_parsed(name: str):
    kind, body = BODIES[name]
    assert len(body) > 6 * 2**20
    began = time.process_time()
    with pytest.raises(RequestError) as caught:
        read(body, kind)
    assert caught.value.status == 413
    assert within(time.process_time() - began, 1.0)  # 4 to 17 s when it is parsed and checked


@pytest.mark.parametrize("item", [b"1", b'""', b"[]", b"{}", b'"a",[1]'])
def test_as_many_values_as_are_allowed_are_judged_quickly(item: bytes):
    count = middleware.MAX_VALUES // middleware._marks(item + b",") - 2
    body = b'{"prompt":[' + b",".join([item] * count) + b"]}"
    assert middleware.MAX_VALUES * 0.99 < middleware._marks(body) <= middleware.MAX_VALUES
    began = time.process_time()
    if item == b"1":
        assert len(read(body, CompletionRequest).prompt) == count
    else:
        with pytest.raises(RequestError) as caught:
            read(body, CompletionRequest)
        assert caught.value.status == 422
    assert within(time.process_time() - began, 2.0)


def test_commas_and_brackets_inside_texts_are_no_values():
    for text in ("a,b;[c]{" * 200_000, '\\",[' * 300_000, "\\\\,[" * 300_000):
        body = json.dumps({"prompt": text}).encode()
        assert middleware._marks(body) > middleware.MAX_VALUES
        assert read(body, CompletionRequest).prompt == text
    tricked = b'{"prompt":"\\\\",' + b",".join([b'"x":1'] * middleware.MAX_VALUES) + b"}"
    assert middleware._has_too_many_values(tricked), "an escaped backslash does not escape the quote behind it"


@pytest.mark.parametrize("body", [b'{"prompt":"a","prompt":"b"}', b'{"prompt":"a","x":[{"prompt":1,"prompt":1}]}'])
def test_a_key_that_is_given_twice_is_named(body: bytes):
    with pytest.raises(RequestError, match="`prompt` is given twice") as caught:
        read(body, CompletionRequest)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize("body", [b"[]", b'"text"', b"null", b"5"])
def test_a_body_that_is_no_object_is_refused_in_plain_words(body: bytes):
    with pytest.raises(RequestError, match="the body must be a JSON object") as caught:
        read(body, ChatRequest)
    assert caught.value.status == 400


def test_a_compressed_body_is_refused_by_its_header():
    with pytest.raises(RequestError, match="Content-Encoding") as caught:
        read(b"\x1f\x8b\x08", ChatRequest, **{"content-encoding": "gzip"})
    assert caught.value.status == 415
    assert read(b'{"prompt":"a"}', CompletionRequest, **{"content-encoding": "identity"}).prompt == "a"


def test_a_request_with_two_lengths_is_refused_and_its_connection_closed():
    """One that a proxy ends elsewhere could carry the beginning of another client's request."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def answers(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("it was passed on")

    headers = [(b"host", b"127.0.0.1"), (b"Content-Length", b"29"), (b"transfer-encoding", b"chunked")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "client": None}
    app = middleware.Middleware(answers, None, Metrics(), frozenset())
    asyncio.run(app(scope, None, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 400
    assert (b"connection", b"close") in [(name.lower(), value) for name, value in sent[0]["headers"]]
    assert b"not both" in sent[1]["body"]
