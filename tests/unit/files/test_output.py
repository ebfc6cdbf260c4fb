"""Where a run may write: an empty folder or a run, apart from everything it reads; asked without changing anything."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from erniekit.errors import ConfigError, ErnieKitError
from erniekit.files import NotOurs, OwnedFiles, own
from erniekit.files.output import RUN, check_output, open_output
from support.snapshot import snapshot


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def refused(output: Path, model: Path, root: Path, files: dict[str, list[str]] | None = None) -> ErnieKitError:
    before = snapshot(root)
    with pytest.raises(ErnieKitError) as error:
        open_output(output, {"model_name_or_path": str(model)}, files or {})
    assert snapshot(root) == before, "a refusal changes nothing"
    assert error.value.exit_code == 2
    assert error.value.where
    assert error.value.fix
    return error.value


def test_the_model_s_own_folder_is_refused(model: Path, tmp_path: Path) -> None:
    assert "is the folder of model_name_or_path" in refused(model, model, tmp_path).what


def test_the_model_s_folder_behind_a_link_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    assert "is the folder of" in refused(tmp_path / "link", model, tmp_path).what
    assert "is the folder of" in refused(model, tmp_path / "link", tmp_path).what


def test_a_model_of_links_to_files_in_the_folder_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    for file in model.iterdir():
        (tmp_path / "links" / file.name).symlink_to(file)
    assert "holds the file that config.json in the folder of model_name_or_path is a link to" in (
        refused(model, tmp_path / "links", tmp_path).what
    )
    assert open_output(tmp_path / "out", {"model_name_or_path": str(tmp_path / "links")}, {}).purpose() == RUN


def test_a_name_that_is_not_utf_8_is_refused_as_nothing_there_could_be_read_again(model: Path, tmp_path: Path) -> None:
    refusal = refused(tmp_path / os.fsdecode(b"run\xff"), model, tmp_path)
    assert "holds bytes that are not UTF-8" in refusal.what
    assert refusal.where.endswith("run\\udcff")


def test_a_folder_inside_the_model_or_around_it_is_refused(model: Path, tmp_path: Path) -> None:
    assert "lies inside" in refused(model / "out", model, tmp_path).what
    assert "holds the folder" in refused(tmp_path, model, tmp_path).what
    assert "lies inside" in refused(model / "deep" / ".." / "out", model, tmp_path).what


def test_a_folder_with_foreign_files_is_refused_and_named(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years")
    assert "thesis.tex" in refused(out, model, tmp_path).what


def test_another_trainer_s_folder_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoint-8").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-8" / "trainer_state.json").write_text("{}")
    assert "checkpoint-8" in refused(tmp_path / "out", model, tmp_path).what


def test_a_file_in_the_place_of_the_folder_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("notes")
    assert "is not a folder" in refused(tmp_path / "out", model, tmp_path).what
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert "is not a folder" in refused(tmp_path / "dangling", model, tmp_path).what


def test_a_checkpoint_of_ours_copied_into_a_folder_may_be_gone_on_from(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoint-8").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-8" / "MANIFEST.json").write_text("{}")
    assert open_output(tmp_path / "out", {"model_name_or_path": str(model)}, {}).purpose() == RUN


@pytest.mark.parametrize("name", [".gitkeep", "lost+found", "slurm-17.out", "train.log"])
def test_what_a_shell_or_a_disk_puts_there_first_counts_as_empty(model: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("")
    assert open_output(out, {"model_name_or_path": str(model)}, {}).purpose() == RUN


def test_a_run_is_gone_on_with_and_its_foreign_files_are_not_in_the_way(model: Path, tmp_path: Path) -> None:
    out = open_output(tmp_path / "out", {}, {}).folder
    own(out / "run.json").write_text("{}")
    (out / "notes.txt").write_text("mine")
    check_output(out, {"model_name_or_path": str(model)}, {})


@pytest.mark.parametrize("name", ["report.html", "config.json", "model-old.safetensors", "metrics.jsonl"])
def test_a_user_s_file_under_a_name_the_run_writes_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    out = open_output(tmp_path / "out", {}, {}).folder
    (out / name).write_text("mine")
    assert name in refused(out, model, tmp_path).what


def test_the_run_s_own_list_of_bad_rows_is_no_dataset_for_it(model: Path, tmp_path: Path) -> None:
    out = open_output(tmp_path / "out", {}, {}).folder
    own(out / "bad_rows.jsonl").write_text("{}")
    error = refused(out, model, tmp_path, {"train_dataset_path": [str(out / "bad_rows.jsonl")]})
    assert isinstance(error, ConfigError)
    assert "bad_rows.jsonl" in error.what


def test_results_of_an_evaluation_do_not_make_a_folder_foreign(model: Path, tmp_path: Path) -> None:
    own(tmp_path / "out" / "eval_results.json").write_text("{}")
    assert OwnedFiles(tmp_path / "out").purpose() == ""
    assert open_output(tmp_path / "out", {"model_name_or_path": str(model)}, {}).purpose() == RUN


def test_a_run_of_a_version_without_records_is_adopted(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    saved = out / "checkpoint-4"
    saved.mkdir(parents=True)
    story = {"format": 1, "version": "0.1.0", "command": "erniekit train", "status": "finished"}
    (out / "run.json").write_text(json.dumps(story))
    (out / "config.json").write_text("{}")
    digest = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"  # sha256 of "{}"
    (saved / "MANIFEST.json").write_text(json.dumps({"files": {"config.json": {"size": 2, "sha256": digest}}}))
    owned = open_output(out, {"model_name_or_path": str(model)}, {})
    assert owned.is_ours("run.json")
    assert owned.is_ours("config.json")


def test_a_run_of_such_a_version_whose_model_was_changed_is_refused(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    story = {"format": 1, "version": "0.1.0", "command": "erniekit train", "status": "finished"}
    (out / "run.json").write_text(json.dumps(story))
    (out / "config.json").write_text("edited")
    assert "config.json" in refused(out, model, tmp_path).what


def test_a_folder_that_cannot_be_created_is_refused_in_three_lines(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("notes")
    with pytest.raises(ConfigError, match="cannot be written") as error:
        open_output(tmp_path / "file" / "out", {}, {})
    assert error.value.where
    assert "is a file, where a folder is needed" in error.value.fix


def test_not_ours_is_an_error_a_user_can_read() -> None:
    assert issubclass(NotOurs, ErnieKitError)
    assert NotOurs("x").exit_code == 2


def test_a_file_given_as_the_model_is_not_blamed_on_the_output(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    check_output(tmp_path / "out", {"model_name_or_path": str(tmp_path / "rows.jsonl")}, {})
