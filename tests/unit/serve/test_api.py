"""A request's way through the routes where time, thoughts and calls matter: a model that says what the test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from erniekit.data.tokenizer import load_tokenizer
from erniekit.serve import api, running_request
from erniekit.serve.api import ApiSettings, make_app
from erniekit.serve.engines.base import Done, GenerationJob, Load, Token, TokenStream
from erniekit.serve.metrics import Metrics
from erniekit.serve.request_parsing import SamplingDefaults, ServedModel
from support.clock import Clock


class Script:
    """An engine that recites: every job gets these ids, one each `pause` seconds."""

    def __init__(self, ids: list[int], end: Done, pause: float = 0.0) -> None:
        self.ids, self.end, self.pause = ids, end, pause
        self.cancelled: list[TokenStream] = []

    def submit(self, *jobs: GenerationJob) -> TokenStream:
        stream = TokenStream(jobs)
        self.task = asyncio.ensure_future(self._recite(stream))
        return stream

    async def _recite(self, stream: TokenStream) -> None:
        for id in self.ids:
            await asyncio.sleep(self.pause)
            for k in range(len(stream.jobs)):
                stream.events.put_nowait((k, Token(id)))
        for k in range(len(stream.jobs)):
            stream.events.put_nowait((k, self.end))

    def cancel(self, stream: TokenStream, number: int | None = None) -> None:
        if number is None:
            self.cancelled.append(stream)

    def load(self) -> Load:
        return Load()

    def stop(self, message: str) -> None: ...


@pytest.fixture(scope="module")
def served(paddle: Path) -> ServedModel:
    tokenizer = load_tokenizer(paddle / "tokenizer")
    return ServedModel("tiny", tokenizer, frozenset({tokenizer.eos_id}), 4000, tokenizer.vocab_size)


@pytest.fixture
def post(served: ServedModel) -> Callable:
    """post(engine, body, timeout) -> (status, text), through ASGI itself."""

    def go(engine: Script, timeout: float = 30, leave_after: int | None = None, **body: object) -> tuple[int, str]:
        app = make_app(engine, {"tiny": served}, ApiSettings(SamplingDefaults(temperature=0), timeout))
        content = json.dumps({"messages": [{"role": "user", "content": "hi"}], **body}).encode()
        sent: list[dict] = []
        gone = asyncio.Event()
        inbox = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive() -> dict:
            if inbox:
                return inbox.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            sent.append(message)
            if leave_after is not None and len(sent) > leave_after:
                gone.set()

        scope = {
            "type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"", "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
            "server": ("a", 1), "client": ("b", 2), "root_path": "",
        }  # fmt: skip
        asyncio.run(asyncio.wait_for(app(scope, receive, send), 30))
        return sent[0]["status"], b"".join(m.get("body", b"") for m in sent).decode()

    return go


def recite(served: ServedModel, text: str, end: str = "stop", **more: float) -> Script:
    return Script(served.tokenizer.encode_text(text), Done(end), **more)


def events(text: str) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_thought_comes_apart_from_the_answer_whole_and_streamed(served, post):
    text = "<think>\nlet me see\n</think>\n\nfour"
    status, body = post(recite(served, text))
    message = json.loads(body)["choices"][0]["message"]
    assert status == 200
    assert (message["reasoning_content"], message["content"]) == ("let me see", "four")
    _, body = post(recite(served, text), stream=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in events(body)]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "let me see"
    assert "".join(d.get("content", "") for d in deltas) == "four"


@pytest.mark.parametrize("rest", ["\n<tool_ca", '\n<tool_call>\n{"n'])
def test_an_answer_cut_inside_a_further_call_ends_by_length_and_shows_nothing_of_it(served, post, rest: str):
    whole = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f"}}]
    _, body = post(recite(served, whole + rest, "length"), tools=tools)
    (choice,) = json.loads(body)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]
    _, body = post(recite(served, whole + rest, "length"), tools=tools, stream=True)
    parts = [chunk["choices"][0] for chunk in events(body)]
    assert parts[-1]["finish_reason"] == "length"
    assert not any(part["delta"].get("content") for part in parts)
    assert sum(len(part["delta"].get("tool_calls", ())) for part in parts) == 1
    _, body = post(recite(served, whole, "length"), tools=tools)
    assert json.loads(body)["choices"][0]["finish_reason"] == "tool_calls", "the call is whole"


def test_a_call_is_read_when_tools_were_given(served, post):
    text = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f"}}]
    _, body = post(recite(served, text), tools=tools)
    (choice,) = json.loads(body)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    _, body = post(recite(served, text), tools=tools, stream=True)
    last = [chunk["choices"][0] for chunk in events(body)]
    assert last[-1]["finish_reason"] == "tool_calls"
    assert any("tool_calls" in choice["delta"] for choice in last)
    _, body = post(recite(served, text))
    assert json.loads(body)["choices"][0]["message"]["content"] == text, "without tools it is text"


def test_an_answer_that_takes_too_long_ends_in_an_error_and_is_cancelled(served, post, monkeypatch):
    """The prompt is prepared in as long as it takes; all but a tenth of a second of the rest passes at once."""
    clock = Clock()
    for module in (api, running_request):
        monkeypatch.setattr(module, "time", clock)

    class Late(Script):
        def submit(self, *jobs: GenerationJob) -> TokenStream:
            clock.sleep(29.9)
            return super().submit(*jobs)

    def late(pause: float) -> Late:
        return Late(served.tokenizer.encode_text("a b c d e f g h") * 1000, Done("stop"), pause)

    slow = late(pause=60)
    status, body = post(slow, timeout=30)
    assert (status, json.loads(body)["error"]["code"]) == (504, "timeout")
    assert slow.cancelled
    status, body = post(late(pause=0.05), timeout=30, stream=True)
    assert status == 200
    assert json.loads(body.rstrip().rpartition("data: ")[2])["error"]["code"] == "timeout"


def test_an_engine_that_fails_gives_that_request_an_error_event_or_a_500(served, post):
    status, body = post(Script([5, 6], Done("error", "it broke")))
    assert (status, json.loads(body)["error"]["message"]) == (500, "it broke")
    _, body = post(Script([5, 6], Done("error", "it broke")), stream=True)
    assert json.loads(body.rstrip().rpartition("data: ")[2])["error"]["type"] == "server_error"


def test_a_client_that_leaves_stops_the_engine_and_not_the_server(served, post):
    engine = recite(served, "a b c d e f g h i j k l m n", pause=0.05)
    _, body = post(engine, stream=True, leave_after=2)
    assert engine.cancelled
    assert "[DONE]" not in body


def test_metrics_count_in_prometheus_form():
    metrics = Metrics()
    metrics.first_token.add(0.02)
    metrics.first_token.add(99)
    metrics.requests["/v1/models", 200] += 2
    lines = metrics.text(Load(running=3, cache_used=0.25)).splitlines()
    assert 'erniekit_requests_total{path="/v1/models",status="200"} 2' in lines
    assert 'erniekit_first_token_seconds_bucket{le="0.025"} 1' in lines
    assert 'erniekit_first_token_seconds_bucket{le="+Inf"} 2' in lines
    assert "erniekit_requests_running 3" in lines
    assert all(line.startswith("#") or len(line.rsplit(" ", 1)) == 2 for line in lines)
