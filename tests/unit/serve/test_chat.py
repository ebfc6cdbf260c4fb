"""The terminal conversation: what is printed, what is remembered, and how it ends.

The server is a real one on a real port.
"""

from __future__ import annotations

import io
import os
import re
import signal
import threading
import time

import pytest

from erniekit.serve import chat as chat_module
from erniekit.serve.chat import answer_prompt, converse
from erniekit.serve.chat_client import Address, Client
from erniekit.serve.chat_session import ChatSession
from support.clock import until
from support.serving import Live

pytestmark = pytest.mark.xdist_group("server")

GREEDY = {"max_tokens": 24, "temperature": 0, "stream": True}


@pytest.fixture
def prompts(live: Live, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each answer was generated from, as text."""
    seen: list[str] = []
    plain = live.engine.submit
    tokenizer = live.loaded.models["talker"].tokenizer

    def submit(*jobs):
        seen.extend(tokenizer.decode(job.prompt, skip_special=False) for job in jobs)
        return plain(*jobs)

    monkeypatch.setattr(live.engine, "submit", submit)
    return seen


def talk_to(live: Live, system: str = "", **more: object) -> ChatSession:
    return ChatSession(Client(Address("127.0.0.1", live.port), model="talker"), {**GREEDY, **more}, system)


def type_in(live: Live, typed: str, **more: object) -> str:
    """What the screen shows after the opening line."""
    output = io.StringIO()
    assert converse(talk_to(live, **more), "talker", io.StringIO(typed), output) == 0
    opened, rest = output.getvalue().split("\n", 1)
    assert opened == f"talker; {chat_module.HINT}"
    return rest


def test_a_conversation_shows_both_sides_and_leaves_on_exit(live):
    shown = type_in(live, "capital of France?\nexit\nnever read\n")
    assert shown == "User: \nAssistant: Paris.\nUser: \n"


def test_the_end_of_a_pipe_ends_the_conversation(live):
    assert type_in(live, "two plus two?") == "User: \nAssistant: four\nUser: \n"
    assert type_in(live, "") == "User: \n"


def test_empty_lines_are_passed_over(live):
    assert type_in(live, "\n   \ngreet me\n").count("Assistant:") == 1


def test_the_first_question_after_clear_is_a_first_question(live):
    shown = type_in(live, "two plus two?\nclear\ncapital of France?\n")
    assert "cleared" in shown
    assert shown.count("Paris.") == 1


def test_without_streaming_the_same_answer_comes_at_once(live):
    assert type_in(live, "greet me\n", stream=False) == type_in(live, "greet me\n")


def test_a_cut_answer_says_so(live):
    assert "[cut at the length limit]" in type_in(live, "greet me\n", max_tokens=4)


def test_a_limit_beyond_the_context_is_no_reason_to_refuse(live):
    assert "Assistant: four\n" in type_in(live, "two plus two?\n", max_tokens=100_000)


def test_a_conversation_that_outgrows_the_model_is_told_and_can_be_cleared(live):
    shown = type_in(live, "two plus two?\n" + "long " * 200 + "\nclear\ntwo plus two?\n")
    assert "error: the server refused: this model's context is 160 tokens" in shown
    assert "fix:   send less text" in shown
    assert shown.count("four") == 2


def test_tokens_are_told_when_they_are_asked_for(live):
    shown = type_in(live, "two plus two?\n", stream_options={"include_usage": True})
    assert "four [" in shown
    assert "prompt tokens," in shown


def test_prompt_prints_the_answer_and_nothing_else(live):
    output, aside = io.StringIO(), io.StringIO()
    assert answer_prompt(talk_to(live), "capital of France?", output, aside) == 0
    assert (output.getvalue(), aside.getvalue()) == ("Paris.\n", "")
    assert answer_prompt(talk_to(live, max_tokens=4), "greet me", output, aside) == 0
    assert aside.getvalue() == "[cut at the length limit]\n"


def test_history_and_system_text_go_into_the_next_prompt(live, prompts):
    output = io.StringIO()
    talk = talk_to(live, system="Be brief.", max_tokens=4)
    converse(talk, "talker", io.StringIO("one\ntwo\n"), output)
    first = talk.messages[2]["content"]
    start = "<|begin_of_sentence|>Be brief.\nUser: one\nAssistant: "
    assert prompts == [start, f"{start}{first}<|end_of_sentence|>User: two\nAssistant: "]
    talk.clear()
    converse(talk, "talker", io.StringIO("three\n"), output)
    assert prompts[2] == "<|begin_of_sentence|>Be brief.\nUser: three\nAssistant: "


class Typist(io.StringIO):
    """Lines to read; None is a Ctrl-C at the prompt."""

    def __init__(self, lines: list[str | None]) -> None:
        super().__init__()
        self.lines = list(lines)

    def readline(self, *args) -> str:
        line = self.lines.pop(0)
        if line is None:
            signal.raise_signal(signal.SIGINT)
        return line or ""


class Impatient(io.StringIO):
    """A screen whose reader presses Ctrl-C when `word` first appears."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word, self.pressed = word, False

    def write(self, text: str) -> int:
        wrote = super().write(text)
        if self.word in text and not self.pressed:
            self.pressed = True
            signal.raise_signal(signal.SIGINT)
        return wrote


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(live):
    output, talk = Impatient("你"), talk_to(live)
    assert converse(talk, "talker", Typist(["greet me\n", "exit\n"]), output) == 0
    shown = re.search("Assistant: (你.*) \\[stopped\\]\n", output.getvalue())  # an event may hold more than one token
    assert shown is not None
    assert output.getvalue().count("User: ") == 2
    assert talk.messages[-1] == {"role": "assistant", "content": shown[1]}


def test_ctrl_c_stops_the_server_too(live):
    """The answer would take eight seconds; while the client waits, the key is pressed from outside."""
    assert live.idle(30)
    before = live.engine.load().steps
    slow = live.engine.models["talker"].layers[0].register_forward_pre_hook(lambda *_: time.sleep(0.05))
    talk = talk_to(live, max_tokens=150, min_tokens=150, temperature=1, seed=3)

    def press() -> None:
        until(lambda: live.engine.load().running == 1)
        os.kill(os.getpid(), signal.SIGINT)

    try:
        presser = threading.Thread(target=press)
        presser.start()
        output = io.StringIO()
        converse(talk, "talker", Typist(["greet me\n", "exit\n"]), output)
        presser.join()
        assert "[stopped]" in output.getvalue()
        assert live.idle(30)
        steps = live.engine.load().steps
        assert steps - before < 150, "not to the answer's end"
        time.sleep(0.1)
        assert live.engine.load().steps == steps
    finally:
        slow.remove()


def test_ctrl_c_before_the_first_token_stops_the_answer_too(live):
    output = Impatient("Assistant: ")
    lines: list[str | None] = ["greet me\n", "clear\n", "two plus two?\n", "exit\n"]
    assert converse(talk_to(live), "talker", Typist(lines), output) == 0
    assert "Assistant: [stopped]\n" in output.getvalue()
    assert "Assistant: four\n" in output.getvalue()


def test_ctrl_c_after_a_stopped_answer_leaves(live):
    assert converse(talk_to(live), "talker", Typist(["greet me\n", None]), Impatient("你")) == 0


def test_ctrl_c_twice_at_the_prompt_leaves_and_once_does_not(live):
    output = io.StringIO()
    assert converse(talk_to(live), "talker", Typist([None, "two plus two?\n", None, None]), output) == 0
    assert "Ctrl-C again to quit" in output.getvalue()
    assert "four" in output.getvalue()


def test_an_interrupted_prompt_has_the_exit_code_of_an_interrupt(live):
    aside = io.StringIO()
    assert answer_prompt(talk_to(live), "greet me", Impatient("你"), aside) == 130
    assert "[stopped]" in aside.getvalue()
