"""What `output_dir` may be: no file, not the base model; a path with blanks or a tilde, or the folder of an old run."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from erniekit.cli.main import main
from support.foreign_files import Ground


def test_an_output_dir_that_is_a_file_is_refused_in_three_lines(
    ground: Ground, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ground.plant("notes.txt")
    ground.remember()
    for command in ("train", "doctor"):
        assert main([command, *words, f"output_dir={ground.folder / 'notes.txt'}"]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 3
    ground.check()


@pytest.mark.parametrize("through", ["itself", "a link", "a folder inside"])
def test_the_base_model_is_never_the_output(
    ground: Ground, words: list[str], tiny_model: Path, through: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ground.folder / "model"
    shutil.copytree(tiny_model, model)
    (ground.folder / "link").symlink_to(model)
    output = {"itself": model, "a link": ground.folder / "link", "a folder inside": model / "out"}[through]
    ground.remember()
    assert main(["train", *words, f"model_name_or_path={model}", f"output_dir={output}"]) == 2
    told = capsys.readouterr().err
    assert "model_name_or_path" in told
    assert "Traceback" not in told
    ground.check()


def test_the_commands_to_type_next_work_with_blanks_in_the_paths(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "my runs" / "it's one"
    assert main(["train", *words, f"output_dir={out}", "fine_tuning=Full", "max_steps=1"]) == 0
    told = capsys.readouterr().out
    split = shlex.split(next(line for line in told.splitlines() if "erniekit split" in line))
    assert main(split[1:]) == 0
    assert (out / "split_export" / "config.json").is_file()


def test_a_folder_s_old_model_is_not_taken_for_that_of_the_run_that_replaces_it(
    ground: Ground, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = ground.folder / "run"
    command = ["train", *words, f"output_dir={out}", "fine_tuning=Full"]
    assert main(command) == 0
    old = (out / "model.safetensors").read_bytes()
    assert main([*command, "overwrite_output_dir=True", "learning_rate=0.01"]) == 0
    new = (out / "model.safetensors").read_bytes()
    assert new != old
    story = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**story, "status": "running"}))  # as a kill before the end leaves it
    (out / "model.safetensors").write_bytes(old)
    assert main(["split", f"output_dir={out}"]) == 0
    assert "the newest checkpoint is taken" in capsys.readouterr().err
    assert (out / "split_export" / "model.safetensors").read_bytes() == new


def test_a_tilde_in_the_output_is_the_home_folder(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words, "doctor=on", "output_dir=~/my run", "max_steps=1"]) == 0
    assert (tmp_path / "home" / "my run" / "run.json").is_file()
    assert not (tmp_path / "~").exists()


def test_a_missing_model_leaves_no_folder_behind(words: list[str], tmp_path: Path) -> None:
    command = [*words, f"model_name_or_path={tmp_path / 'none'}", f"output_dir={tmp_path / 'out'}"]
    for word in ("train", "doctor"):
        assert main([word, *command]) == 2
    assert list(tmp_path.iterdir()) == []
