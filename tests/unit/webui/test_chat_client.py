"""The Chat tab's side of a conversation, with a server that says what it is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from erniekit.webui.chat_client import ChatError, list_models, stream_chat


class Script:
    """What the server answers, and what it was asked."""

    status, lines = 200, [""]
    asked: dict[str, object]
    key = ""


@pytest.fixture
def script() -> Iterator[tuple[Script, str]]:
    told = Script()

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.key = self.headers.get("Authorization", "")
            told.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._say()

        def do_GET(self) -> None:
            self._say()

        def _say(self) -> None:
            self.send_response(told.status)
            self.end_headers()
            self.wfile.write("\n".join(told.lines).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield told, f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def delta(**words: str) -> str:
    return "data: " + json.dumps({"choices": [{"delta": words}]}) + "\n"


def test_thoughts_and_answers_come_apart_and_in_order(script: tuple[Script, str]) -> None:
    told, url = script
    said = (delta(role="assistant"), delta(reasoning_content="hm"), delta(content="a"), delta(content="b"))
    told.lines = [*said, "data: [DONE]"]
    heard = list(stream_chat(url, [{"role": "user", "content": "?"}], temperature=0.5))
    assert heard == [("thought", "hm"), ("answer", "a"), ("answer", "b")]
    assert told.asked == {"messages": [{"role": "user", "content": "?"}], "stream": True, "temperature": 0.5}


def test_the_servers_key_is_sent_along(script: tuple[Script, str]) -> None:
    told, url = script
    told.lines = ["data: [DONE]"]
    assert list(stream_chat(url, [], "the-key")) == []
    assert told.key == "Bearer the-key"


def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(script: tuple[Script, str]) -> None:
    told, url = script
    told.lines = [delta(content="a")]
    with pytest.raises(ChatError, match="was interrupted"):
        list(stream_chat(url, []))


def test_an_error_in_the_stream_is_told_in_the_servers_words(script: tuple[Script, str]) -> None:
    told, url = script
    told.lines = ['data: {"error": {"message": "the engine failed"}}']
    with pytest.raises(ChatError, match="the engine failed"):
        list(stream_chat(url, []))


def test_a_refusal_is_told_in_the_servers_words(script: tuple[Script, str]) -> None:
    told, url = script
    told.status, told.lines = 400, ['{"error": {"message": "the prompt is too long"}}']
    with pytest.raises(ChatError, match="too long"):
        list(stream_chat(url, []))


def test_models_are_listed_by_name(script: tuple[Script, str]) -> None:
    told, url = script
    told.lines = ['{"data": [{"id": "style"}, {"id": "base"}]}']
    assert list_models(url) == ["style", "base"]


def test_a_server_that_is_gone_is_said_to_be(script: tuple[Script, str]) -> None:
    with pytest.raises(ChatError, match="does not answer"):
        list_models("http://127.0.0.1:9/v1")
