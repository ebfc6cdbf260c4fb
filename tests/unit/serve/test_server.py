"""The command's own decisions: which engine, which key, which address, and what it says when it cannot."""

from __future__ import annotations

import importlib.util

import pytest

from erniekit.cli.main import main
from erniekit.config import load
from erniekit.errors import ConfigError
from erniekit.serve.server import check_address, choose_engine, is_loopback, need_packages, note_unread, read_key


def test_the_key_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("ERNIEKIT_API_KEY", raising=False)
    assert read_key(load(["m"], "server")) is None
    monkeypatch.setenv("ERNIEKIT_API_KEY", "from-env")
    assert read_key(load(["m"], "server")) == "from-env"
    (tmp_path / "key").write_text("from-file\n")
    assert read_key(load(["m", f"api_key_file={tmp_path}/key"], "server")) == "from-file"


def test_a_key_file_that_is_missing_or_empty_is_an_error_not_an_open_door(tmp_path):
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "gone"):
        with pytest.raises(ConfigError) as error:
            read_key(load(["m", f"api_key_file={tmp_path}/{name}"], "server"))
        assert "api_key_file" in error.value.where


@pytest.mark.parametrize(
    ("host", "own"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.8.8.8", True), ("0.0.0.0", False),
                      ("::", False), ("10.0.0.1", False), ("example.org", False), ("localhost.evil.org", False)],
)  # fmt: skip
def test_only_addresses_of_this_machine_are_its_own(host, own):
    assert is_loopback(host) is own


def test_other_machines_need_a_key_or_a_clear_word(capsys):
    open_host = load(["m", "host=0.0.0.0"], "server")
    with pytest.raises(ConfigError) as error:
        check_address(open_host, None)
    assert "allow_unauthenticated" in error.value.fix
    check_address(open_host, "key")
    check_address(load(["m", "host=0.0.0.0", "allow_unauthenticated=1"], "server"), None)
    assert "there is no key" in capsys.readouterr().err


def test_typed_keys_of_training_are_named_and_those_of_a_recipe_are_not(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("model_name_or_path: m\nlearning_rate: 1.0e-4\ncompile: true\n")
    note_unread(load([str(tmp_path / "run.yaml"), "max_model_len=100", "device=cpu", "verify=full"], "server"))
    assert capsys.readouterr().err == ""
    note_unread(load(["m", "compile=True", "max_seq_len=100"], "server"))
    assert "without effect on a server: compile, max_seq_len" in capsys.readouterr().err


def test_the_embedded_engine_is_the_default_and_one_device_is_its_limit():
    assert choose_engine(load(["m"], "server")) == "transformers"
    assert choose_engine(load(["m", "engine=vllm"], "server")) == "vllm"
    with pytest.raises(ConfigError) as error:
        choose_engine(load(["m", "engine=transformers", "tensor_parallel_degree=2"], "server"))
    assert error.value.where == "tensor_parallel_degree"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "fastdeploy"])
def test_an_engine_that_is_not_installed_is_named_with_its_install_command(engine, capsys, tmp_path):
    if importlib.util.find_spec(engine):
        pytest.skip(f"{engine} is installed here")
    assert main(["server", str(tmp_path), f"engine={engine}"]) == 2
    said = capsys.readouterr().err
    assert f"engine {engine} is not installed" in said
    assert "pip install" in said


def test_without_the_extra_the_server_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        need_packages()
    assert "erniekit-torch[serve]" in error.value.fix


def test_a_folder_without_a_model_is_the_users_mistake(tmp_path, capsys):
    assert main(["server", str(tmp_path), "port=0"]) == 2
    assert "neither a model" in capsys.readouterr().err
