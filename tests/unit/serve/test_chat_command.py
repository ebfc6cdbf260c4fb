"""The words of `erniekit chat`: whom they talk to, what they send, and what is refused.

Servers are real ones on real ports; one test is a real process.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from erniekit.api_load import load
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.cli.main import main
from erniekit.config import load as load_config
from erniekit.data.template import prompt_ids
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import ConfigError
from erniekit.models.init import init_weights
from erniekit.serve import chat as chat_module
from erniekit.serve.chat import answer_prompt, connect, own_flags, request_fields, server_of
from erniekit.serve.chat_session import ChatSession
from support.transformers_loop import said_by_transformers

pytestmark = pytest.mark.xdist_group("server")

GREEDY = {"max_tokens": 24, "temperature": 0, "stream": True}


def test_prompt_and_system_are_taken_from_the_words_and_the_rest_is_the_runs():
    words = ["dir", "--prompt", "a --b c=d", "top_p=0.5", "--system=Be brief.", "--temperature", "0"]
    assert own_flags(words) == (
        ["dir", "top_p=0.5", "--temperature", "0"],
        {"prompt": "a --b c=d", "system": "Be brief."},
        [],
    )
    assert own_flags(["dir", "--image", "a.png", "--video=v.mp4", "--image", "b,c.png"]) == (
        ["dir"], {}, [("image", "a.png"), ("video", "v.mp4"), ("image", "b,c.png")],
    )  # fmt: skip
    for words in (["--image"], ["--video="]):
        with pytest.raises(ConfigError, match="needs a path"):
            own_flags(words)
    with pytest.raises(ConfigError, match="--prompt needs a text"):
        own_flags(["dir", "--prompt"])


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
            assert answer_prompt(ChatSession(client, GREEDY), "capital of France?", output, output) == 0
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
    words = ["chat", str(tmp_path), "temperature=0", "device=cpu", "max_new_tokens=12", "--prompt", "hello"]
    assert main(words) == 0
    twin, tokenizer = load(tmp_path)
    prompt = prompt_ids([{"role": "user", "content": "hello"}], tokenizer)
    said = said_by_transformers(twin, prompt, 12, [tokenizer.eos_id, tokenizer.end_id])
    assert capsys.readouterr().out == tokenizer.decode(said) + "\n"
    assert main([*words, "num_speculative_tokens=2"]) == 0
    assert capsys.readouterr().out == tokenizer.decode(said) + "\n"


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
    assert f"loading {talker}\n{talker}, float32 on cpu; {chat_module.HINT}\n" in done.stdout
    assert "Assistant: 你好 😀!" in done.stdout
    assert done.stderr == ""


def test_the_command_answers_one_prompt_of_a_folder_and_of_a_server(talker, live, capsys):
    for words in ([str(talker), "device=cpu"], [live.url], ["--port", str(live.port)]):
        assert main(["chat", *words, "temperature=0", "--prompt", "capital of France?"]) == 0
        shown = capsys.readouterr()
        assert (shown.out, shown.err) == ("Paris.\n", "")


@pytest.mark.parametrize("prompt", ["", "  "])
def test_a_prompt_without_words_is_refused(talker, capsys, prompt):
    assert main(["chat", str(talker), "device=cpu", "--prompt", prompt]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert (
        shown.err
        == 'error: --prompt is empty: there is nothing to answer\nwhere: flag --prompt\nfix:   --prompt "..."\n'
    )


def test_weights_that_give_no_numbers_are_told_with_what_helps(tmp_path, capsys):
    model = make_tiny_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert main(["chat", str(model), "device=cpu", "--prompt", "one"]) == 2
    said = capsys.readouterr().err
    assert "the model gave no usable number for the next token" in said
    assert "fix:   its weights or adapter are damaged or not trained: name another checkpoint" in said


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
