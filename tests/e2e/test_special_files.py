"""A named pipe or a socket where a file belongs: whatever reads it would wait for ever, so it is refused by name."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from erniekit.cli.main import main
from erniekit.errors import ErnieKitError


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    """What waits on a pipe in spite of all would wait for ever."""

    def enough(*_: object) -> NoReturn:
        raise TimeoutError("still waiting for the pipe")

    before = signal.signal(signal.SIGALRM, enough)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja"]
)
def test_a_pipe_in_a_model_folder_is_refused(name: str, train: Callable, tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    with pytest.raises(ErnieKitError, match=f"{name} is a named pipe") as caught:
        train(tmp_path / "run", model_name_or_path=model)
    assert caught.value.where == str(model / name)
    assert caught.value.fix


@pytest.mark.parametrize("keys", [{}, {"train_dataset_type": "erniekit"}, {"stage": "PT"}], ids=str)
def test_a_pipe_as_data_is_refused(keys: dict[str, str], train: Callable, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(ErnieKitError, match=r"rows.jsonl is a named pipe"):
        train(tmp_path / "run", train_dataset_path=tmp_path / "rows.jsonl", **keys)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_pipe_among_token_files_is_refused(suffix: str, train: Callable, tmp_path: Path) -> None:
    for name in (".bin", ".idx"):
        (tmp_path / f"text{name}").touch()
    (tmp_path / f"text{suffix}").unlink()
    os.mkfifo(tmp_path / f"text{suffix}")
    with pytest.raises(ErnieKitError, match="is a named pipe"):
        train(tmp_path / "run", stage="PT", train_dataset_path=None, input_dir=tmp_path / "text")


def test_a_recipe_that_is_a_pipe_or_a_socket_ends_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.yaml")
    assert main(["config", "pipe.yaml"]) == 2
    assert "error: pipe.yaml is a named pipe; a plain file is needed" in capsys.readouterr().err
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.yaml")
        assert main(["config", "socket.yaml"]) == 2
    assert "error: socket.yaml is a socket" in capsys.readouterr().err
