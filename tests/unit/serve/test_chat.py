"""The terminal conversation: what is printed, what is remembered, and how it ends. One test is a real process."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.api_load import load
from erniekit.cli.main import main
from erniekit.config import load as load_config
from erniekit.errors import ConfigError
from erniekit.serve import chat as chat_module
from erniekit.serve.chat import ChatSettings, Talk, _own_flags, ask, chat, choose_folder, settings_from
from erniekit.serve.generate import Generator, Sampling

GREEDY = Sampling(max_new_tokens=24, temperature=0)
QUIET = ChatSettings(GREEDY)


def talk(folder: Path, typed: str, settings: ChatSettings = QUIET) -> str:
    """What the screen shows after the two opening lines."""
    output = io.StringIO()
    assert chat(folder, settings, io.StringIO(typed), output) == 0
    loading, opened, rest = output.getvalue().split("\n", 2)
    assert loading == f"loading {folder}"
    assert opened == f"{folder}, float32 on cpu; {chat_module.WORDS}"
    return rest


def test_a_conversation_shows_both_sides_and_leaves_on_exit(talker):
    shown = talk(talker, "capital of France?\nexit\nnever read\n")
    assert shown == "User: \nAssistant: Paris.\nUser: \n"


def test_the_end_of_a_pipe_ends_the_conversation(talker):
    assert talk(talker, "two plus two?") == "User: \nAssistant: four\nUser: \n"
    assert talk(talker, "") == "User: \n"


def test_empty_lines_are_passed_over(talker):
    assert talk(talker, "\n   \ngreet me\n").count("Assistant:") == 1


def test_the_first_question_after_clear_is_a_first_question(talker):
    shown = talk(talker, "two plus two?\nclear\ncapital of France?\n")
    assert "cleared" in shown
    assert shown.count("Paris.") == 1


def test_without_streaming_the_same_answer_comes_at_once(talker):
    settings = ChatSettings(GREEDY, stream=False)
    assert talk(talker, "greet me\n", settings) == talk(talker, "greet me\n")


def test_a_cut_answer_says_so(talker):
    shown = talk(talker, "greet me\n", ChatSettings(Sampling(max_new_tokens=4, temperature=0)))
    assert "[cut at the length limit]" in shown


def test_a_conversation_that_outgrows_the_model_is_told_and_can_be_cleared(talker):
    settings = ChatSettings(Sampling(max_new_tokens=8, temperature=0, max_model_len=40))
    shown = talk(talker, "two plus two?\n" + "long " * 40 + "\nclear\ntwo plus two?\n", settings)
    assert "error: the conversation is" in shown
    assert shown.count("four") == 2


def test_prompt_prints_the_answer_and_nothing_else(talker):
    output = io.StringIO()
    assert ask(talker, QUIET, "capital of France?", output) == 0
    assert output.getvalue() == "Paris.\n"


class Recording(Generator):
    """Notes what each answer was generated from."""

    def answer(self, prompt, *args):
        self.__dict__.setdefault("asked", []).append(self.tokenizer.decode(prompt, skip_special=False))
        return super().answer(prompt, *args)


def test_history_and_system_text_go_into_the_next_prompt(talker):
    generator = Recording(*load(talker))
    conversation = Talk(generator, ChatSettings(GREEDY, system="Be brief."))
    first, _, _ = (conversation.say(text, lambda piece: None).text for text in ("one", "two", "x"))
    start = "<|begin_of_sentence|>Be brief.\nUser: one\nAssistant: "
    assert generator.asked[0] == start
    assert generator.asked[1] == f"{start}{first}<|end_of_sentence|>User: two\nAssistant: "
    conversation.clear()
    conversation.say("three", lambda piece: None)
    assert generator.asked[3] == "<|begin_of_sentence|>Be brief.\nUser: three\nAssistant: "


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


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(talker):
    output = Impatient("你")
    assert chat(talker, QUIET, Typist(["greet me\n", "exit\n"]), output) == 0
    assert "你 [stopped]\n" in output.getvalue()
    assert output.getvalue().count("User: ") == 2


def test_ctrl_c_before_the_first_token_stops_the_answer_too(talker):
    output = Impatient("Assistant: ")
    assert chat(talker, QUIET, Typist(["greet me\n", "clear\n", "two plus two?\n", "exit\n"]), output) == 0
    assert "Assistant: [stopped]\n" in output.getvalue()
    assert "Assistant: four\n" in output.getvalue()


def test_ctrl_c_after_a_stopped_answer_leaves(talker):
    assert chat(talker, QUIET, Typist(["greet me\n", None]), Impatient("你")) == 0


def test_ctrl_c_twice_at_the_prompt_leaves_and_once_does_not(talker):
    output = io.StringIO()
    assert chat(talker, QUIET, Typist([None, "two plus two?\n", None, None]), output) == 0
    assert "Ctrl-C again to leave" in output.getvalue()
    assert "four" in output.getvalue()


def test_prompt_and_system_are_taken_from_the_words_and_the_rest_is_the_runs():
    words = ["dir", "--prompt", "a --b c=d", "top_p=0.5", "--system=Be brief.", "--temperature", "0"]
    assert _own_flags(words) == (
        ["dir", "top_p=0.5", "--temperature", "0"],
        {"prompt": "a --b c=d", "system": "Be brief."},
    )
    with pytest.raises(ConfigError, match="--prompt needs a text"):
        _own_flags(["dir", "--prompt"])


def test_a_typed_folder_is_opened_itself(talker):
    assert choose_folder(load_config([str(talker)], "chat")) == (str(talker), None)


def test_a_recipe_means_what_it_trained_when_there_is_something(talker, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model_name_or_path: {talker}\noutput_dir: {tmp_path / 'out'}\n")
    assert choose_folder(load_config([str(recipe)], "chat")) == (str(talker), None)
    adapter = tmp_path / "out" / "checkpoint-5"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    assert choose_folder(load_config([str(recipe)], "chat")) == (str(adapter), str(talker))


def test_lora_path_puts_an_adapter_on_the_typed_folder(talker):
    cfg = load_config([str(talker), "lora_path=some/adapter"], "chat")
    assert choose_folder(cfg) == ("some/adapter", str(talker))


def test_sampling_keys_reach_the_generator(talker):
    words = [str(talker), "max_new_tokens=7", "temperature=0.5", "top_p=0.9", "repetition_penalty=1.2", "min_tokens=2"]
    settings = settings_from(load_config([*words, "device=cpu", "max_model_len=99"], "chat"), "hi", None)
    assert settings.sampling == Sampling(7, 2, 0.5, 0.9, 1.2, 0.0, 0.0, 99)
    assert settings.system == "hi"
    assert settings.dtype is None


def test_the_command_talks_through_a_pipe(talker):
    program = "import sys; from erniekit.cli.main import main; sys.exit(main())"
    words = ["chat", str(talker), "temperature=0", "--max_new_tokens", "24", "device=cpu"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        input="greet me\nexit\n",
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "Assistant: 你好 😀!" in done.stdout
    assert done.stderr == ""


def test_the_command_answers_one_prompt(talker, capsys):
    assert main(["chat", str(talker), "temperature=0", "device=cpu", "--prompt", "capital of France?"]) == 0
    assert capsys.readouterr().out == "Paris.\n"


def test_a_folder_that_is_none_is_an_error_without_traceback(tmp_path, capsys):
    assert main(["chat", str(tmp_path / "nothing"), "--prompt", "x"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "error: model" in shown.err
    assert "Traceback" not in shown.err
