"""The final model in output_dir: copies, put where only files of an earlier end of the run may be replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.checkpoint import manifest
from erniekit.checkpoint.final_model import publish_model
from erniekit.checkpoint.writer import publish
from erniekit.errors import CheckpointError
from erniekit.files import OwnedFiles
from support.snapshot import snapshot


def a_checkpoint(output: Path, step: int, **files: str) -> Path:
    def write(folder: Path) -> None:
        for name, text in {"optimizer.safetensors": "moments", "state.json": "{}", **files}.items():
            (folder / name).write_text(text)

    return publish(output, f"checkpoint-{step}", write)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return OwnedFiles(tmp_path / "run").open("run").folder


def test_weights_and_config_appear_and_the_state_of_training_does_not(output: Path) -> None:
    saved = a_checkpoint(output, 4, **{"config.json": "{}", "model.safetensors": "weights"})
    publish_model(saved, output)
    found = {p.name for p in output.iterdir() if p.is_file()}
    assert found == {"config.json", "model.safetensors", ".erniekit-files"}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_writing_into_a_published_file_does_not_reach_the_checkpoint(output: Path, name: str) -> None:
    saved = a_checkpoint(output, 4, **{"config.json": "{}", "model.safetensors": "weights"})
    publish_model(saved, output)
    with (output / name).open("r+") as file:  # in place, as an editor or save_pretrained may
        file.write("X")
    manifest.check(saved)


def test_foreign_weights_in_the_folder_stay(output: Path) -> None:
    (output / "mine.safetensors").write_text("mine")
    (output / "mine.safetensors.index.json").write_text("{}")
    publish_model(a_checkpoint(output, 4, **{"model.safetensors": "w"}), output)
    assert (output / "mine.safetensors").read_text() == "mine"
    assert (output / "mine.safetensors.index.json").read_text() == "{}"


def test_shards_of_the_model_before_are_removed_and_no_others(output: Path) -> None:
    publish_model(a_checkpoint(output, 2, **{"model-1.safetensors": "a", "model-2.safetensors": "b"}), output)
    (output / "model-3.safetensors").write_text("mine")
    publish_model(a_checkpoint(output, 4, **{"model.safetensors": "whole"}), output)
    assert {p.name for p in output.glob("model*")} == {"model.safetensors", "model-3.safetensors"}


def test_a_published_file_that_a_user_changed_is_neither_replaced_nor_removed(output: Path) -> None:
    publish_model(a_checkpoint(output, 2, **{"model-1.safetensors": "a", "config.json": "{}"}), output)
    (output / "model-1.safetensors").write_text("edited by the user")
    publish_model(a_checkpoint(output, 4, **{"model.safetensors": "whole", "config.json": "{}"}), output)
    assert (output / "model-1.safetensors").read_text() == "edited by the user"
    (output / "config.json").write_text("edited")
    later = a_checkpoint(output, 6, **{"model.safetensors": "newer", "config.json": "{ }"})
    with pytest.raises(CheckpointError, match=r"config\.json is in the way") as error:
        publish_model(later, output)
    assert str(later) in error.value.fix, "says where the model is"
    assert (output / "config.json").read_text() == "edited"
    assert (output / "model.safetensors").read_text() == "whole", "nothing is replaced by half"


def test_a_foreign_file_or_link_in_the_way_stops_it_before_anything_changes(output: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "base.safetensors"
    elsewhere.write_text("the base model")
    (output / "model.safetensors").symlink_to(elsewhere)
    saved = a_checkpoint(output, 4, **{"config.json": "{}", "model.safetensors": "w"})
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match="in the way"):
        publish_model(saved, output)
    assert snapshot(tmp_path) == before


def test_a_link_under_the_name_it_copies_through_is_not_followed(output: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "precious"
    elsewhere.write_text("precious")
    (output / ".new-model.safetensors").symlink_to(elsewhere)
    publish_model(a_checkpoint(output, 4, **{"model.safetensors": "w"}), output)
    assert elsewhere.read_text() == "precious"
    assert (output / "model.safetensors").read_text() == "w"


def test_publishing_the_same_checkpoint_twice_changes_nothing(output: Path) -> None:
    saved = a_checkpoint(output, 4, **{"model.safetensors": "w"})
    publish_model(saved, output)
    before = snapshot(output)
    publish_model(saved, output)
    after = snapshot(output)
    assert {k: v for k, v in after.items() if k != ".erniekit-files"} == {
        k: v for k, v in before.items() if k != ".erniekit-files"
    }
