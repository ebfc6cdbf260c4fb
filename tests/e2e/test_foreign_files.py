"""Training on folders with somebody's files and links in them: no foreign byte changes.

A command may refuse (exit code 2) or do its work (0); what it may never do is change what it did not write.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.cli.main import main
from erniekit.files import RECORD
from support.foreign_files import FILES, LINKS, Ground
from support.snapshot import snapshot


def test_training_into_a_folder_of_somebody_s_files(ground: Ground, words: list[str]) -> None:
    ground.plant(*FILES, *LINKS)
    ground.remember()
    for extra in ([], ["overwrite_output_dir=True"], ["fine_tuning=Full"]):
        assert main(["train", *words, f"output_dir={ground.folder}", *extra]) == 2
        ground.check()
    assert main(["doctor", *words, f"output_dir={ground.folder}"]) == 2
    ground.check()


@pytest.mark.parametrize("tuning", ["Full", "LoRA"])
def test_training_on_in_a_run_that_holds_somebody_s_files(ground: Ground, words: list[str], tuning: str) -> None:
    """Files under names the run never writes stay; under its names they stop it; links go, their targets stay."""
    command = ["train", *words, f"output_dir={ground.folder}", f"fine_tuning={tuning}"]
    assert main([*command, "max_steps=1"]) == 0
    ours = set(snapshot(ground.root))
    older = [name for name in LINKS if name not in ("checkpoint-2", "checkpoint-3", ".old-checkpoint-9-77-0123abcd")]
    ground.plant("notes.txt", "other.safetensors", ".hidden", *older)
    (ground.folder / "checkpoint-0").symlink_to(ground.elsewhere / "checkpoint-2")
    ground.remember(*ours)
    assert main([*command, "override_resume=True"]) == 0
    ground.check(links_may_go=True)
    assert not (ground.folder / "checkpoint-0").is_symlink(), "rotated: the link is gone"
    assert (ground.folder / "other.safetensors").is_file()
    assert (ground.elsewhere / "checkpoint-2" / "model.safetensors").read_bytes() == b"another run's weights"


def test_a_run_started_anew_keeps_what_is_not_its_own(ground: Ground, words: list[str]) -> None:
    command = ["train", *words, f"output_dir={ground.folder}", "fine_tuning=Full"]
    assert main([*command, "max_steps=1"]) == 0
    ours = set(snapshot(ground.root))
    ground.plant("notes.txt", "other.safetensors", "checkpoint-2", "checkpoint-3")
    ground.remember(*ours)
    assert main([*command, "overwrite_output_dir=True"]) == 0
    ground.check(links_may_go=True)


@pytest.mark.parametrize("name", ["model-mine.safetensors", "eval_results.json", "generation_config.json"])
def test_a_file_put_into_a_run_under_one_of_its_names_stops_the_next_command(
    ground: Ground, words: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", *words, f"output_dir={ground.folder}", "fine_tuning=LoRA"]
    assert main([*command, "max_steps=1"]) == 0
    (ground.folder / name).write_text("mine")
    ground.remember()
    assert main([*command, "override_resume=True"]) == 2
    assert name in capsys.readouterr().err
    ground.check()


def test_a_mistyped_command_on_a_finished_run_changes_nothing_in_it(
    ground: Ground, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ground.folder / "run"
    command = ["train", *words, f"output_dir={out}", "fine_tuning=LoRA"]
    assert main(command) == 0
    assert json.loads((out / "run.json").read_text())["status"] == "finished"
    ground.remember()
    for wrong in ("learning_rate=0.5", "train_dataset_path=nope.jsonl", "lora_rank=3", "resume_from_checkpoint=nope"):
        assert main([*command, wrong]) == 2, wrong
        assert "Traceback" not in capsys.readouterr().err
        ground.check()


def test_the_cache_keeps_what_lies_beside_it(ground: Ground, words: list[str]) -> None:
    cache = ground.folder / "cache"
    cache.mkdir()
    (cache / "notes.txt").write_text("mine")
    (cache / "link").symlink_to(ground.elsewhere)
    ground.remember()
    command = ["train", *words, f"cache_dir={cache}", "max_steps=1"]
    assert main([*command, f"output_dir={ground.folder / 'one'}"]) == 0
    assert main([*command, f"output_dir={ground.folder / 'two'}"]) == 0
    ground.check()


def test_rotation_keeps_a_checkpoint_that_somebody_put_files_into(ground: Ground, words: list[str]) -> None:
    command = ["train", *words, f"output_dir={ground.folder}", "fine_tuning=Full"]
    assert main([*command, "max_steps=2"]) == 0
    (ground.folder / "checkpoint-1" / "notes.txt").write_text("mine")
    other = ground.folder / "checkpoint-0"
    other.mkdir()
    (other / "MANIFEST.json").write_text('{"other": "tool"}')
    (other / "weights.bin").write_text("another program's")
    ground.remember(*(name for name in snapshot(ground.root) if "checkpoint-2" in name or "/checkpoint-" not in name))
    assert main([*command, "override_resume=True", "max_steps=6"]) == 0
    ground.check()
    assert not (ground.folder / "checkpoint-2").exists(), "those that are whole and ours are rotated"


def test_results_that_a_user_edited_are_not_replaced(ground: Ground, words: list[str], tmp_path: Path) -> None:
    broken = tmp_path / "rows.jsonl"
    rows = next(w for w in words if w.startswith("train_dataset_path=")).partition("=")[2]
    broken.write_text(Path(rows).read_text() + "no json\n")
    command = [*words, f"train_dataset_path={broken}", "max_bad_fraction=0.9", "max_steps=1"]
    assert main(["train", *command, f"output_dir={ground.folder}"]) == 0
    (ground.folder / "bad_rows.jsonl").write_text("corrected by hand")
    (ground.folder / "report.html").write_text("with my notes")
    ground.remember()
    assert main(["train", *command, f"output_dir={ground.folder}"]) == 2
    ground.check()


def test_a_finished_run_is_not_given_records_of_settings_it_was_not_trained_with(
    ground: Ground, words: list[str]
) -> None:
    command = ["train", *words, f"output_dir={ground.folder}", "max_steps=1"]
    assert main(command) == 0
    ground.remember()
    assert main([*command, "learning_rate=0.007", "override_resume=True"]) == 2
    ground.check()


def test_every_planted_name_was_really_there(ground: Ground) -> None:
    ground.plant(*FILES, *LINKS)
    ground.remember()
    assert {f"work/{name}" for name in (*FILES, *LINKS)} <= set(ground.planted)
    (ground.folder / "notes.txt").write_text("changed")
    with pytest.raises(AssertionError):
        ground.check()
    assert RECORD not in FILES
