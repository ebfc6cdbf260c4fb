"""What a run may do to the checkpoints it finds: branches, other runs and other trainers' folders lose nothing, and the
final model is a checkpoint whose bytes were checked."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from erniekit.checkpoint import manifest, writer
from erniekit.errors import CheckpointError, ConfigError
from erniekit.train.metrics import LogHook


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()  # the final model may share its bytes
    path.write_bytes(data)


# --- branches ---


def test_a_branch_from_an_old_checkpoint_replaces_none_of_the_later_ones(
    train: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run, keys = tmp_path / "rc", dict(max_steps=6, save_steps=2, doctor="off", gradient_accumulation_steps=1)
    train(run, **keys)
    before = {step: content(run / f"checkpoint-{step}") for step in (2, 4, 6)}
    with pytest.raises(ConfigError):  # a command that is refused moves nothing
        train(run, **keys, resume_from_checkpoint=run / "checkpoint-2", learning_rate=5e-4)
    assert checkpoints(run) == [f"checkpoint-{step}" for step in (2, 4, 6)]
    again = dict(resume_from_checkpoint=run / "checkpoint-2", learning_rate=5e-4, override_resume=True)
    train(run, **{**keys, **again, "max_steps": 4})
    assert checkpoints(run) == ["checkpoint-2", "checkpoint-4", "checkpoint-4.aside-1", "checkpoint-6.aside-1"]
    assert content(run / "checkpoint-2") == before[2]
    said = capsys.readouterr().err
    for step in (4, 6):
        assert content(run / f"checkpoint-{step}.aside-1") == before[step]
        assert f"kept as checkpoint-{step}.aside-1" in said
    assert content(run / "checkpoint-4") != before[4]


def test_starting_anew_over_a_finished_run_keeps_all_its_checkpoints(train: Callable, tmp_path: Path) -> None:
    run, keys = tmp_path / "run", dict(save_steps=2, doctor="off", gradient_accumulation_steps=1)
    train(run, max_steps=4, **keys)
    before = {step: content(run / f"checkpoint-{step}") for step in (2, 4)}
    train(run, max_steps=2, **keys, overwrite_output_dir=True, seed=7)
    assert checkpoints(run) == ["checkpoint-2", "checkpoint-2.aside-1", "checkpoint-4.aside-1"]
    assert {step: content(run / f"checkpoint-{step}.aside-1") for step in (2, 4)} == before


def test_another_runs_checkpoint_of_the_same_step_is_not_taken_for_this_runs_result(
    train: Callable, tmp_path: Path
) -> None:
    keys = dict(max_steps=2, save_steps=2, doctor="off", gradient_accumulation_steps=1)
    train(tmp_path / "one", **keys)
    train(tmp_path / "other", **keys, seed=7)
    mine = content(tmp_path / "one" / "checkpoint-2")
    train(tmp_path / "one", **keys, seed=7, resume_from_checkpoint=tmp_path / "other" / "checkpoint-2")
    assert content(tmp_path / "one" / "checkpoint-2.aside-1") == mine
    name = "model.safetensors"
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    assert mine[name] != (tmp_path / "one" / name).read_bytes()


def test_another_trainers_checkpoint_folder_is_refused_before_anything_is_spent(
    train: Callable, tmp_path: Path
) -> None:
    run, keys = tmp_path / "run", dict(save_steps=2, doctor="off", gradient_accumulation_steps=1)
    train(run, max_steps=2, **keys)
    theirs = run / "checkpoint-4"
    theirs.mkdir()
    (theirs / "pytorch_model.bin").write_bytes(b"years of work")
    (run / "metrics.jsonl").unlink()
    with pytest.raises(CheckpointError, match="checkpoint-4 in output_dir: no MANIFEST") as caught:
        train(run, max_steps=4, override_resume=True, **keys)
    assert "move" in caught.value.fix
    assert not (run / "metrics.jsonl").exists(), "no step was made"
    assert checkpoints(run) == ["checkpoint-2", "checkpoint-4"]
    assert content(theirs) == {"pytorch_model.bin": b"years of work"}
    shutil.move(theirs, run / "theirs")
    train(run, max_steps=4, override_resume=True, **keys)
    assert checkpoints(run) == ["checkpoint-2", "checkpoint-4"]


def test_a_read_error_stops_a_resume_and_the_same_command_goes_on_afterwards(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, keys = tmp_path / "run", dict(save_steps=2, doctor="off", gradient_accumulation_steps=1)
    train(run, max_steps=4, **keys)
    before = {name: content(run / name) for name in checkpoints(run)}
    plain, hits = manifest.measure, []

    def measure(path: Path, like: str = "") -> manifest.FileRecord:
        if path.name == "optimizer.safetensors":
            hits.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(path, like)

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "measure", measure)
        with pytest.raises(CheckpointError, match=r"optimizer\.safetensors cannot be read: Input/output error"):
            train(run, max_steps=4, **keys)
    assert len(hits) == 1
    assert {name: content(run / name) for name in checkpoints(run)} == before
    train(run, max_steps=4, **keys)
    assert {name: content(run / name) for name in checkpoints(run)} == before


# --- restarts by the launcher ---


class Crash(Exception):
    pass


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """An error of ours while step k is booked; the launcher would start the rank again."""
    plain = LogHook.after_step

    def arrange(step: int) -> None:
        def after_step(self, trainer, result):
            plain(self, trainer, result)
            if result.step == step:
                raise Crash

        monkeypatch.setattr(LogHook, "after_step", after_step)

    return arrange


@pytest.fixture
def launched(train: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """launched("name", output, key=value, ...): the same as a rank of the launch of that name."""
    from erniekit.recipes import run

    def go(launch: str, output: Path, **keys: object):
        with monkeypatch.context() as patch:
            plain = run.run_train
            patch.setattr(run, "run_train", lambda cfg, command: plain(cfg, command, launch))
            return train(output, **keys)

    return go


@pytest.mark.full
def test_a_restart_of_a_run_that_starts_anew_goes_on_from_its_own_checkpoints(
    train: Callable, launched: Callable, crash_at: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run, keys = tmp_path / "run", dict(save_steps=2, doctor="off", gradient_accumulation_steps=1, max_steps=6)
    train(run, **keys)
    anew = {**keys, "overwrite_output_dir": True, "seed": 7}
    for crash in (1, 3, 5):
        crash_at(crash)
        capsys.readouterr()
        with pytest.raises(Crash):
            launched("today", run, **anew)
        want = {1: None, 3: None, 5: "checkpoint-2"}[crash]  # nothing of its own yet: the key acts as it did
        assert (f"it resumes from {want}" in capsys.readouterr().out) == bool(want)
    crash_at(-1)
    launched("today", run, **anew)
    assert "resume_from" not in (said := capsys.readouterr().out)
    assert "overwrite_output_dir took effect when it began; it resumes from checkpoint-4" in said
    mine = [f"checkpoint-{step}" for step in (2, 4, 6)]
    assert checkpoints(run) == sorted([*mine, *(f"{name}.aside-1" for name in mine)]), "set aside once"
    train(run, **anew)  # the command typed again: it starts anew, as it says
    assert checkpoints(run) == sorted([*mine, *(f"{name}.aside-{n}" for name in mine for n in (1, 2))])


def test_a_restart_of_a_run_from_a_named_checkpoint_goes_on_from_its_newest(
    train: Callable, launched: Callable, crash_at: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run, keys = tmp_path / "run", dict(save_steps=2, doctor="off", gradient_accumulation_steps=1, max_steps=8)
    train(run, **{**keys, "max_steps": 2})
    named = dict(resume_from_checkpoint=run / "checkpoint-2", override_resume=True, save_total_limit=2)
    crash_at(7)
    with pytest.raises(Crash):
        launched("today", run, **keys, **named)
    assert not (run / "checkpoint-2").exists(), "rotation has taken it"
    crash_at(-1)
    launched("today", run, **keys, **named)
    assert "resumes from checkpoint-6" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        train(run, **keys, **named)  # typed anew, the key names what is not there


# --- the final model ---


@pytest.fixture
def best(rows: Path) -> dict[str, object]:
    """The best is step 2, as training then makes it worse and worse."""
    return dict(
        max_steps=6, save_steps=2, doctor="off", gradient_accumulation_steps=1, eval_dataset_path=rows, eval_steps=2,
        evaluation_strategy="steps", load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True,
        save_total_limit=2,
    )  # fmt: skip


def test_a_damaged_best_checkpoint_does_not_become_the_final_model(
    train: Callable, best: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = tmp_path / "run"
    train(run, **best)
    name = "model.safetensors"
    assert checkpoints(run) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert (run / name).read_bytes() == (run / "checkpoint-2" / name).read_bytes()
    flip_a_bit(run / "checkpoint-2" / name)
    capsys.readouterr()
    result = train(run, **best)
    assert (run / name).read_bytes() == (run / "checkpoint-6" / name).read_bytes()
    said = capsys.readouterr().err
    assert "FINAL MODEL IS NOT THE BEST CHECKPOINT but checkpoint-6" in said
    assert "checkpoint-2: model.safetensors does not match its sha256" in said
    assert "checkpoint-6" in result.note
    story = json.loads((run / "run.json").read_text())
    assert any("NOT THE BEST" in event["text"] for event in story["events"])


def test_a_best_checkpoint_that_is_gone_ends_neither_the_run_nor_its_rerun(
    train: Callable, best: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = tmp_path / "run"
    train(run, **best)
    shutil.rmtree(run / "checkpoint-2")
    result = train(run, **best)
    assert "checkpoint-2, is not in output_dir" in capsys.readouterr().err
    name = "model.safetensors"
    assert (run / name).read_bytes() == (run / "checkpoint-6" / name).read_bytes()
    assert result.steps == 6


@pytest.mark.parametrize("background", [True, pytest.param(False, marks=pytest.mark.full)])
def test_one_failed_save_of_the_best_step_ends_neither_the_run_nor_its_rerun(
    background: bool, train: Callable, best: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    run, plain, hits = tmp_path / "run", writer.publish, []
    keys = {**best, "save_steps": 100}  # so only the best is saved, and the last step
    keys |= {"unified_checkpoint_config": "async_save"} if background else {}

    def publish(parent: Path, name: str, *args: object, **how: object) -> Path:
        if name == "checkpoint-2":
            hits.append(name)
            raise CheckpointError("checkpoint-2 was not written: No space left on device")
        return plain(parent, name, *args, **how)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(writer, "publish", publish)
        train(run, **keys)
    assert hits == ["checkpoint-2"]
    on_screen = capsys.readouterr()
    said = on_screen.err
    what = "checkpoint-2 was not written: No space left on device"
    assert (on_screen.out + said).count(what) == 1  # the warning; the run's record has it as an event
    story = json.loads((run / "run.json").read_text())
    (event,) = [event for event in story["events"] if event["name"] == "not saved"]
    assert event["step"] == 2
    assert event["text"].startswith(what)
    assert "the best so far, of step 2, was not saved; the best on disk: none" in said
    assert "FINAL MODEL" not in said
    for _ in range(2):  # the second time it is the rerun's
        state = json.loads((run / "trainer_state.json").read_text())
        assert Path(state["best_model_checkpoint"]).name == "checkpoint-4", "the best of those that are on disk"
        name = "model.safetensors"
        assert (run / name).read_bytes() == (run / "checkpoint-4" / name).read_bytes()
        train(run, **keys)
