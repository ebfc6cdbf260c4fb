"""Other servers' ways of saying things: thoughts under several names, errors in several shapes, streams that break.

A stand-in on a real port says word for word what it is told to.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from erniekit.errors import ConfigError
from erniekit.serve import chat_media
from erniekit.serve.chat import answer_prompt, converse
from erniekit.serve.chat_client import Address, ChatAnswer, Client, NoAnswer, address_of, is_address
from erniekit.serve.chat_screen import Screen
from erniekit.serve.chat_session import ChatSession
from support.seen import MEDIA


class StandIn(ThreadingHTTPServer):
    """replies: what it says to the questions in turn, (status, body) each; the last one goes on. asked: what came."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models: tuple[int, Any] = (200, {"data": [{"id": "first"}, {"id": "second"}]})
        self.replies: list[tuple[int, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    def client(self, **more: Any) -> Client:
        return Client(Address("127.0.0.1", self.server_port), **more)


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        self._say(*self.server.models)

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        replies = self.server.replies
        self._say(*(replies.pop(0) if len(replies) > 1 else replies[0]))

    def _say(self, status: int, body: Any) -> None:
        self.server.keys.append(self.headers.get("authorization"))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def other() -> Iterator[StandIn]:
    server = StandIn()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def events(*deltas: dict[str, Any], finish: str = "stop", end: bytes = b"data: [DONE]\n\n") -> bytes:
    choices = [{"delta": delta} for delta in deltas] + [{"delta": {}, "finish_reason": finish}]
    lines = [b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n" for choice in choices]
    return b": a comment\n\n" + b"".join(lines) + end


def answer_of(client: Client, **options: Any) -> ChatAnswer:
    into = ChatAnswer()
    for _ in client.answer([{"role": "user", "content": "hi"}], {"stream": True, **options}, into):
        pass
    return into


THOUGHTS = {
    "reasoning_content": events({"reasoning_content": "hm, "}, {"reasoning_content": "yes"}, {"content": "It is."}),
    "reasoning": events({"reasoning": "hm, yes"}, {"content": "It "}, {"content": "is."}),
    "tags in the text": events({"content": "<think"}, {"content": ">hm, yes</"}, {"content": "think>\n\nIt is."}),
}


@pytest.mark.parametrize("kind", THOUGHTS)
def test_thoughts_are_shown_apart_and_stay_out_of_the_history(other, kind):
    other.replies = [(200, THOUGHTS[kind])]
    talk, output = ChatSession(other.client(), {"stream": True}), io.StringIO()
    converse(talk, "it", io.StringIO("is it?\nsure?\n"), output)
    assert "Assistant: thinking:\nhm, yes\nanswer:\nIt is.\n" in output.getvalue()
    assert other.asked[1]["messages"] == [
        {"role": "user", "content": "is it?"},
        {"role": "assistant", "content": "It is."},
        {"role": "user", "content": "sure?"},
    ]


def test_a_prompts_thoughts_do_not_mix_with_its_answer(other):
    other.replies = [(200, THOUGHTS["reasoning"])]
    output, aside = io.StringIO(), io.StringIO()
    assert answer_prompt(ChatSession(other.client(), {"stream": True}), "is it?", output, aside) == 0
    assert (output.getvalue(), aside.getvalue()) == ("It is.\n", "thinking:\nhm, yes\n")


def test_thoughts_are_dimmed_on_a_terminal(other, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    other.replies = [(200, THOUGHTS["reasoning"])]
    output = io.StringIO()
    ChatSession(other.client(), {"stream": True}).send("is it?", Screen(output, output))
    assert output.getvalue() == "thinking:\n\x1b[2mhm, yes\x1b[0m\nanswer:\nIt is."


def test_a_whole_answer_is_read_like_a_streamed_one(other):
    message = {"role": "assistant", "content": "It is.", "reasoning_content": "hm"}
    other.replies = [(200, {"choices": [{"message": message, "finish_reason": "length"}], "usage": {}})]
    answer = answer_of(other.client(), stream=False)
    assert (answer.text, answer.thought, answer.finish) == ("It is.", "hm", "length")


def test_what_a_terminal_would_obey_is_not_shown(other):
    other.replies = [(200, events({"content": "a\x1b]0;title\x07b\tc\r\x9b2Jd\n"}))]
    output = io.StringIO()
    answer_prompt(ChatSession(other.client(), {"stream": True}), "x", output, output)
    assert output.getvalue() == "a]0;titleb\tc2Jd\n\n"


def test_the_first_model_is_asked_for_unless_another_is_named(other):
    client = other.client()
    client.choose_model()
    assert client.model == "first"
    client.choose_model("second")
    assert client.model == "second"
    with pytest.raises(ConfigError, match="no model 'third'") as caught:
        client.choose_model("third")
    assert caught.value.fix == "one of: first, second"


def test_a_server_without_a_list_of_models_is_asked_for_its_default(other):
    other.models = (404, {"detail": "Not Found"})
    client = other.client()
    client.choose_model()
    assert client.model == "default"


@pytest.mark.parametrize("page", [b"<html>hello</html>", b"[]", b'{"data": 3}', b'{"data": [{}]}'])
def test_what_is_no_openai_server_is_told_from_one(other, page):
    other.models = (200, page)
    with pytest.raises(NoAnswer, match="not an OpenAI-compatible server"):
        other.client().choose_model()


def test_the_key_goes_with_every_request_and_nowhere_else(other):
    other.replies = [(200, events({"content": "a"}))]
    client = other.client(key="secret")
    client.choose_model()
    answer_of(client)
    assert other.keys == ["Bearer secret"] * 2
    assert "secret" not in repr(client)


@pytest.mark.parametrize(
    ("status", "body", "what", "fix"),
    [
        (401, {"error": {"message": "an API key is needed"}}, "an API key is needed", "ERNIEKIT_API_KEY"),
        (429, {"error": {"message": "busy"}}, "busy", "retry"),
        (400, {"object": "error", "message": "too\nhot"}, "too hot", "clear"),
        (422, {"detail": "no such field"}, "no such field", "clear"),
        (500, b"<html>", "status 500", "clear"),
        (501, b"<html>", "status 501", "no OpenAI-compatible server"),
        (500, {"error": "plain words"}, "plain words", "clear"),
    ],
)
def test_a_refusal_is_told_in_the_servers_own_words(other, status, body, what, fix):
    other.replies = [(status, body)]
    with pytest.raises(NoAnswer) as caught:
        answer_of(other.client())
    assert caught.value.what == f"the server refused: {what}"
    assert fix in caught.value.fix
    assert caught.value.status == status


def test_a_refusal_of_a_picture_is_one_error_that_names_its_file(other):
    told = "error: it breaks off\nwhere: messages[3].content[1]\nfix:   send it whole"
    other.replies = [(200, events({"content": "a"})), (400, {"error": {"message": told}})]
    talk = ChatSession(other.client(), {"stream": True}, "Be brief.")
    talk.send("first", Screen(io.StringIO(), io.StringIO()))
    talk.attached = [chat_media.attach(str(MEDIA / name), "image") for name in ("a.png", "b.png")]
    with pytest.raises(NoAnswer) as caught:
        talk.send("which?", Screen(io.StringIO(), io.StringIO()))
    assert caught.value.lines() == ["error: it breaks off", f"where: {MEDIA / 'b.png'}", "fix:   send it whole"]


def test_of_an_opened_folder_errors_name_the_folder(other):
    other.replies = [(400, {"error": {"message": "no"}})]
    with pytest.raises(NoAnswer) as caught:
        answer_of(replace(other.client(), place="runs/one"))
    assert caught.value.where == "runs/one"


@pytest.mark.parametrize(
    "refusal",
    [
        {"error": {"message": "this model's context is 64 tokens", "code": "context_length_exceeded"}},
        {"message": "'max_tokens' is too large: 1024. This model's maximum context length is 64 tokens"},
    ],
)
def test_a_longest_answer_without_room_is_asked_again_without_that_limit(other, refusal):
    other.replies = [(400, refusal), (200, events({"content": "a"}))]
    assert answer_of(other.client(), max_tokens=1024, top_p=0.5).text == "a"
    first, second = other.asked
    assert first.pop("max_tokens") == 1024
    assert first == second


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (events({"content": "so"}, end=b""), "the server closed the connection"),
        (events({"content": "so"}, end=b'data: {"error": {"message": "it stops"}}\n\n'), "refused: it stops"),
        (b"data: {]\n\n", "not a chat completion"),
    ],
)
def test_a_broken_stream_is_told_and_leaves_the_conversation_as_it_was(other, body, what):
    other.replies = [(200, body), (200, events({"content": "well"}))]
    talk, output = ChatSession(other.client(), {"stream": True}), io.StringIO()
    converse(talk, "it", io.StringIO("one\ntwo\n"), output)
    assert what in output.getvalue()
    assert "Assistant: well\n" in output.getvalue()
    assert [m["content"] for m in talk.messages] == ["two", "well"]


def test_a_silent_server_is_not_waited_for_for_ever():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as deaf:
        client = Client(Address("127.0.0.1", deaf.getsockname()[1]), timeout=0.1)
        with pytest.raises(NoAnswer, match=r"sent nothing for 0\.1 s") as caught:
            client.choose_model()
    assert caught.value.fix == "raise request_timeout"


@pytest.mark.parametrize("word", ["http://", "http://a:99999999", "http://me:secret@there/v1"])
def test_addresses_that_are_none_are_refused(word):
    with pytest.raises(ConfigError) as caught:
        address_of(word)
    assert "secret" not in str(caught.value)


def test_folders_and_model_names_are_no_addresses():
    assert not any(map(is_address, ["model", "a/b", "./x:y", "C:/models", "baidu/ERNIE-4.5-0.3B-PT", "/a:1/b"]))
    assert all(map(is_address, ["localhost:8188", "[::1]:8188", "HTTP://a", "https://a.b/c/v1"]))


def test_a_client_needs_neither_torch_nor_the_servers_packages(other):
    """The address is answered at once on a machine that has neither."""
    other.replies = [(200, events({"content": "a"}))]
    program = (
        "import sys; from erniekit.cli.main import main; code = main(sys.argv[1:]); "
        "print({'torch', 'fastapi', 'uvicorn'} & set(sys.modules), code)"
    )
    words = ["chat", f"http://127.0.0.1:{other.server_port}", "--prompt", "x"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60)
    assert done.stdout == "a\nset() 0\n", done.stderr
