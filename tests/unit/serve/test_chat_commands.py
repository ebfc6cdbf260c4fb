"""Commands and messages of several lines, typed into a conversation with a real server."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from erniekit.serve.chat import converse
from erniekit.serve.chat_client import Address, Client
from erniekit.serve.chat_commands import COMMANDS, command_in
from erniekit.serve.chat_files import read_text_file
from erniekit.serve.chat_session import ChatSession
from support.serving import Live

pytestmark = pytest.mark.xdist_group("server")

GREEDY = {"max_tokens": 24, "temperature": 0, "stream": True}


def type_in(live: Live, typed: str, system: str = "") -> tuple[str, ChatSession]:
    """What the screen shows after the opening line, and the conversation."""
    talk = ChatSession(Client(Address("127.0.0.1", live.port), model="talker"), GREEDY, system)
    output = io.StringIO()
    assert converse(talk, "talker", io.StringIO(typed), output) == 0
    return output.getvalue().split("\n", 1)[1], talk


def said(talk: ChatSession) -> list[str]:
    return [message["content"] for message in talk.messages if message["role"] == "user"]


@pytest.mark.parametrize("word", ["exit", "quit", "/exit", "/quit", "  exit  "])
def test_each_word_for_the_end_quits(live: Live, word: str) -> None:
    shown, talk = type_in(live, f"two plus two?\n{word}\nnever read\n")
    assert said(talk) == ["two plus two?"]
    assert shown.endswith("User: \n")


@pytest.mark.parametrize("word", ["clear", "/clear"])
def test_each_word_for_a_reset_resets_and_drops_what_waits(live: Live, word: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("dropped")
    _, talk = type_in(live, f"greet me\n/file {tmp_path}/a.txt\n{word}\ntwo plus two?\n", "be brief")
    assert [message["content"] for message in talk.messages] == ["be brief", "two plus two?", "four"]


def test_help_lists_every_command(live: Live) -> None:
    shown, talk = type_in(live, "/help\n")
    assert all(usage in shown and about in shown for usage, about in COMMANDS.items())
    assert '"""' in shown
    assert said(talk) == []


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ('"""two\nplus\n\ntwo?"""\n', "two\nplus\n\ntwo?"),
        ('"""\ntwo plus\n  two?\n"""\n', "two plus\n  two?"),
        ('"""two plus two?"""\n', "two plus two?"),
        ("two \\\nplus \\\ntwo?\n", "two \nplus \ntwo?"),
        ('"""exit\n"""\n', "exit"),
        ('"""two\nplus', "two\nplus"),
        ("two plus\\", "two plus"),
    ],
)
def test_a_message_may_have_several_lines(live: Live, typed: str, message: str) -> None:
    assert said(type_in(live, typed)[1]) == [message]


def test_a_file_goes_into_the_next_message_alone(live: Live, tmp_path: Path) -> None:
    file = tmp_path / "a file.py"
    file.write_text("\ufeffprint('```')\n", encoding="utf-8")
    shown, talk = type_in(live, f'/file "{file}"\nwhat is it?\nand now?\n')
    assert "file a file.py (1 line, 13 characters) goes with the next question" in shown
    assert said(talk)[0] == "a file.py:\n````\nprint('```')\n````\n\nwhat is it?"
    assert said(talk)[1:] in (["and now?"], [])


def test_the_system_text_is_set_shown_and_removed_and_what_was_said_stays(live: Live) -> None:
    shown, talk = type_in(live, "two plus two?\n/system\n/system be kind\n/system\nexit\n")
    assert "there is no system text" in shown
    assert "system: be kind" in shown
    assert [m["content"] for m in talk.messages] == ["be kind", "two plus two?", "four"]
    assert type_in(live, '/system ""\nexit\n', "old")[1].messages == []


def test_a_conversation_is_saved_as_a_row_and_never_over_a_file(live: Live, tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    typed = f"/save {file}\ntwo plus two?\n/save {file}\n/save {file}\n/save {tmp_path}/none/x\n"
    shown, _ = type_in(live, typed, "be brief")
    assert "error: the conversation is empty" in shown
    assert f"2 messages saved to {file}" in shown
    assert "error: there is a file of that name" in shown
    assert "error: it cannot be written: No such file or directory" in shown
    (line,) = file.read_text().splitlines()
    assert [m["role"] for m in json.loads(line)["messages"]] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("typed", "what"),
    [
        ("/nonsense\n", "error: there is no command /nonsense"),
        ("/file\n", "error: /file needs a path"),
        ("/file /no/such/file\n", "error: the file cannot be read: No such file"),
        ("/file {tmp}\n", "error: "),
        ("/file {tmp}/empty\n", "error: it is empty"),
        ("/file {tmp}/binary\n", "error: it is not UTF-8 text"),
        ("/file {tmp}/large\n", "error: 1,048,577 bytes are too many"),
    ],
)
def test_a_mistake_is_told_in_three_lines_and_the_conversation_goes_on(
    live: Live, tmp_path: Path, typed: str, what: str
) -> None:
    (tmp_path / "empty").write_bytes(b" \n")
    (tmp_path / "binary").write_bytes(b"\x89PNG\0\xff")
    (tmp_path / "large").write_bytes(b"x" * (2**20 + 1))
    shown, talk = type_in(live, typed.format(tmp=tmp_path) + "two plus two?\n")
    assert what in shown
    assert "fix: " in shown
    assert said(talk) == ["two plus two?"]


@pytest.mark.parametrize("line", ["/etc/passwd, what is it?", "exit the building", "/", "a /help", "clear it"])
def test_what_only_looks_like_a_command_is_a_message(line: str) -> None:
    assert command_in(line) is None


def test_a_device_is_no_file() -> None:
    from erniekit.errors import ErnieKitError

    with pytest.raises(ErnieKitError):
        read_text_file("/dev/zero")


def test_pasted_lines_are_a_message_whatever_they_begin_with() -> None:
    for text in ("/file a.txt\nand more", "clear\nexit", "/exit now\n\nlater"):
        assert command_in(text) is None
    assert command_in("/exit\n") == ("/exit", "")
