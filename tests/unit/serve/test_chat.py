"""The terminal conversation: what is printed, what is remembered, whom it talks to and how it ends.

The server is a real one on a real port; one test is a real process.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from erniekit.api_load import load
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.cli.main import main
from erniekit.config import load as load_config
from erniekit.data.template import prompt_ids
from erniekit.errors import ConfigError
from erniekit.models.init import init_weights
from erniekit.serve import chat as chat_module
from erniekit.serve.chat import ChatSession, ask, connect, converse, own_flags, request_fields, server_of
from erniekit.serve.chat_client import Address, Client
from erniekit.serve.folder import choose_folder
from erniekit.serve.generate import Generator, Sampling
from support.serving import Live, until

pytestmark = pytest.mark.xdist_group("server")

GREEDY = {"max_tokens": 24, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def live(talker: Path) -> Iterator[Live]:
    server = Live(talker, "max_model_len=160", "served_model_name=talker")
    yield server
    server.close()


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
    assert opened == f"talker; {chat_module.WORDS}"
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
    assert "fix:   start anew with clear" in shown
    assert shown.count("four") == 2


def test_tokens_are_told_when_they_are_asked_for(live):
    shown = type_in(live, "two plus two?\n", stream_options={"include_usage": True})
    assert "four [" in shown
    assert "tokens asked," in shown


def test_prompt_prints_the_answer_and_nothing_else(live):
    output, aside = io.StringIO(), io.StringIO()
    assert ask(talk_to(live), "capital of France?", output, aside) == 0
    assert (output.getvalue(), aside.getvalue()) == ("Paris.\n", "")
    assert ask(talk_to(live, max_tokens=4), "greet me", output, aside) == 0
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
    assert "你 [stopped]\n" in output.getvalue()
    assert output.getvalue().count("User: ") == 2
    assert talk.messages[-1] == {"role": "assistant", "content": "你"}


def test_ctrl_c_stops_the_server_too(live):
    """The answer would take eight seconds; while the client waits, the key is pressed from outside."""
    assert live.idle(30)
    before = live.engine.load().steps
    slow = live.engine.models["talker"].layers[0].register_forward_pre_hook(lambda *_: time.sleep(0.05))
    talk = talk_to(live, max_tokens=150, min_tokens=150, temperature=1, seed=3)

    def press() -> None:
        until(lambda: live.engine.load().running == 1, 30)
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
    assert "Ctrl-C again to leave" in output.getvalue()
    assert "four" in output.getvalue()


def test_an_interrupted_prompt_has_the_exit_code_of_an_interrupt(live):
    aside = io.StringIO()
    assert ask(talk_to(live), "greet me", Impatient("你"), aside) == 130
    assert "[stopped]" in aside.getvalue()


def test_prompt_and_system_are_taken_from_the_words_and_the_rest_is_the_runs():
    words = ["dir", "--prompt", "a --b c=d", "top_p=0.5", "--system=Be brief.", "--temperature", "0"]
    assert own_flags(words) == (
        ["dir", "top_p=0.5", "--temperature", "0"],
        {"prompt": "a --b c=d", "system": "Be brief."},
    )
    with pytest.raises(ConfigError, match="--prompt needs a text"):
        own_flags(["dir", "--prompt"])


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


def test_lora_path_puts_an_adapter_on_the_typed_folder(talker, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    cfg = load_config([str(talker), f"lora_path={tmp_path}"], "chat")
    assert choose_folder(cfg) == (str(tmp_path), str(talker))


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["TALKER", "lora_path=TMP/none"], "there is no adapter"),
        (["TALKER", "lora_path=TALKER"], "a whole model, no adapter"),
        (["TALKER", "lora_path=TMP,TALKER"], "chat takes one adapter; lora_path names 2"),
        (["TMP", "model_name_or_path=TALKER"], "both name model_name_or_path"),
        (["TALKER", "TMP"], "both name model_name_or_path"),
        (["TALKER", "output_dir=TMP"], "output_dir and model_name_or_path both name what to open"),
        (["lora_path=TMP", "output_dir=TALKER"], "output_dir and lora_path both name what to open"),
    ],
)
def test_what_names_two_things_to_open_or_none_is_refused(words, what, talker, tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text("{}")
    words = [word.replace("TALKER", str(talker)).replace("TMP", str(tmp_path)) for word in words]
    assert main(["chat", *words, "--prompt", "hello"]) == 2
    assert what in capsys.readouterr().err


def test_a_recipe_whose_run_began_with_an_adapter_means_what_it_trained(talker, tmp_path):
    adapter = tmp_path / "out" / "checkpoint-5"
    for folder in (adapter, tmp_path / "began"):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: {talker}\noutput_dir: {tmp_path / 'out'}\nlora_path: {tmp_path / 'began'}\n"
    )
    assert choose_folder(load_config([str(recipe)], "chat")) == (str(tmp_path / "began"), str(talker))
    told = {"config": [{"key": "lora_path", "value": [str(tmp_path / "began")]}]}
    (tmp_path / "out" / "run.json").write_text(json.dumps(told))
    assert choose_folder(load_config([str(recipe)], "chat")) == (str(adapter), str(talker))


@pytest.mark.parametrize(
    ("words", "url", "must"),
    [
        ([], "http://127.0.0.1:8188/v1", True),
        (["http://there:9000"], "http://there:9000/v1", True),
        (["https://there/api/v1/"], "https://there:443/api/v1", True),
        (["there:9000"], "http://there:9000/v1", True),
        (["port=9000", "host=0.0.0.0"], "http://127.0.0.1:9000/v1", True),
        (["host=::1"], "http://[::1]:8188/v1", True),
        (["some/folder"], None, False),
        (["lora_path=adapter"], None, False),
        (["RECIPE"], "http://127.0.0.1:8123/v1", False),
        (["RECIPE", "port=9000"], "http://127.0.0.1:9000/v1", True),
        (["RECIPE", "some/folder"], None, False),
    ],
)
def test_who_is_talked_to_follows_from_what_was_given(words, url, must, tmp_path):
    recipe = tmp_path / "run_chat.yaml"
    recipe.write_text("model_name_or_path: baidu/model\noutput_dir: None\nport: 8123\n")
    address, needed = server_of(load_config([str(recipe) if w == "RECIPE" else w for w in words], "chat"))
    assert (address and address.url, needed) == (url, must)


def test_a_server_and_a_folder_at_once_are_too_much(capsys):
    assert main(["chat", "some/folder", "--port", "9000"]) == 2
    assert "names a server and model_name_or_path a folder" in capsys.readouterr().err


def test_every_sampling_key_is_sent():
    keys = {
        "max_new_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "frequency_penalty": 0.1,
        "presence_penalty": 0.2, "repetition_penalty": 1.2, "seed": 5, "enable_thinking": True,
    }  # fmt: skip
    sent = request_fields(load_config([f"{name}={value}" for name, value in keys.items()], "chat"))
    assert sent.pop("max_tokens") == keys.pop("max_new_tokens")
    assert sent.pop("chat_template_kwargs") == {"enable_thinking": keys.pop("enable_thinking")}
    assert sent.pop("stream") is True
    assert sent == keys
    assert request_fields(load_config(["stream=False"], "chat"))["stream"] is False
    assert request_fields(load_config(["top_k=0"], "chat"))["top_k"] == -1
    assert "top_k" not in request_fields(load_config([], "chat"))


def test_a_recipe_opens_its_folder_when_nobody_answers_and_talks_to_who_does(talker, live, tmp_path):
    recipe = tmp_path / "run_chat.yaml"
    for port, about in ((1, f"{talker}, float32 on cpu"), (live.port, f"talker at {live.url}/v1")):
        recipe.write_text(f"model_name_or_path: {talker}\noutput_dir: None\nport: {port}\nmax_model_len: 64\n")
        with connect(load_config([str(recipe), "device=cpu"], "chat"), io.StringIO()) as (client, opened):
            assert opened == about
            output = io.StringIO()
            assert ask(ChatSession(client, GREEDY), "capital of France?", output, output) == 0
            assert output.getvalue() == "Paris.\n"


def test_an_opened_folder_leaves_no_thread_and_no_port_behind(talker):
    import socket

    before = set(threading.enumerate())
    with connect(load_config([str(talker), "device=cpu"], "chat"), io.StringIO()) as (client, _):
        port = client.address.port
        assert client.key, "anybody on this machine could use it"
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1)


def test_a_folder_with_experts_and_layers_for_further_tokens_can_be_talked_to(paddle, tmp_path, capsys):
    folder = ModelFolder(paddle / "moe_old")
    config = replace(folder.config, mtp_layers=1)
    model = folder.spec.build(config)
    init_weights(model, 0, 0.1)
    write_model(tmp_path, config, model.state_dict().__getitem__, tokenizer_from=paddle / "tokenizer")
    assert main(["chat", str(tmp_path), "temperature=0", "device=cpu", "max_new_tokens=12", "--prompt", "hello"]) == 0
    twin = Generator(*load(tmp_path))  # transformers' own loop
    prompt = prompt_ids([{"role": "user", "content": "hello"}], twin.tokenizer)
    assert capsys.readouterr().out == twin.answer(prompt, Sampling(12, temperature=0)).text + "\n"


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
    assert f"loading {talker}\n{talker}, float32 on cpu; {chat_module.WORDS}\n" in done.stdout
    assert "Assistant: 你好 😀!" in done.stdout
    assert done.stderr == ""


def test_the_command_answers_one_prompt_of_a_folder_and_of_a_server(talker, live, capsys):
    for words in ([str(talker), "device=cpu"], [live.url], ["--port", str(live.port)]):
        assert main(["chat", *words, "temperature=0", "--prompt", "capital of France?"]) == 0
        shown = capsys.readouterr()
        assert (shown.out, shown.err) == ("Paris.\n", "")


def test_a_folder_that_is_none_is_an_error_without_traceback(tmp_path, capsys):
    assert main(["chat", str(tmp_path / "nothing"), "--prompt", "x"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "error: model" in shown.err
    assert "Traceback" not in shown.err


def test_a_server_that_is_absent_is_told_with_the_command_that_starts_one(capsys):
    assert main(["chat", "--port", "1", "--prompt", "x"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "error: no server answers: Connection refused"
    assert said[1] == "where: http://127.0.0.1:1/v1"
    assert "erniekit server DIR --port 1" in said[2]
    assert len(said) == 3


def test_a_missing_package_is_told_with_the_extra_that_brings_it(talker, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    assert main(["chat", str(talker), "--prompt", "x"]) == 2
    said = capsys.readouterr().err
    assert "erniekit-torch[serve]" in said
    assert "where: erniekit chat" in said


def test_another_engine_is_started_by_the_server_not_by_chat(talker, capsys):
    assert main(["chat", str(talker), "engine=vllm", "--prompt", "x"]) == 2
    assert "--engine vllm" in capsys.readouterr().err
