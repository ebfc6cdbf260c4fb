"""A folder is published whole or not at all, in the one order that survives a crash."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from erniekit.checkpoint import manifest, writer
from erniekit.checkpoint.manifest import MANIFEST, FileRecord
from erniekit.checkpoint.shards import write_shards
from erniekit.errors import CheckpointError


def weights(text: str):
    def write(folder: Path) -> None:
        (folder / "model.txt").write_text(text)
        (folder / "sub").mkdir()
        (folder / "sub" / "state.json").write_text("{}")

    return write


def hidden_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


class Trace(writer.FileOps):
    """Records what the real calls were, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattribute__(self, name):
        attribute = super().__getattribute__(name)
        if name not in ("mkdir", "create", "sync", "rename", "unlink", "rmdir"):
            return attribute

        def traced(*paths):
            # ".tmp-step-1-123-ab12cd34" -> "tmp": the id differs from run to run
            short = [p.name.split("-")[0].strip(".") if p.name.startswith(".") else p.name for p in paths]
            self.calls.append(" ".join([name, *short]))
            return attribute(*paths)

        return traced


@pytest.fixture
def trace(monkeypatch):
    ops = Trace()
    monkeypatch.setattr(writer, "ops", ops)
    return ops


def test_everything_is_on_disk_before_the_rename_that_publishes(tmp_path, trace):
    (tmp_path / "out").mkdir()
    path = writer.publish(tmp_path / "out", "step-1", weights("a"), info={"step": 1})
    assert trace.calls == [
        "mkdir tmp",
        "sync model.txt",
        "sync state.json",
        f"create {MANIFEST}",
        f"sync {MANIFEST}",
        "sync sub",
        "sync tmp",
        "rename tmp step-1",
        "sync out",
    ]
    assert manifest.check(path).info == {"step": 1}
    assert set(manifest.load(path).files) == {"model.txt", "sub/state.json"}
    assert hidden_in(tmp_path / "out") == []


def test_the_same_name_again_replaces_the_folder_in_one_piece(tmp_path, trace):
    writer.publish(tmp_path, "step-1", weights("old"))
    trace.calls.clear()
    path = writer.publish(tmp_path, "step-1", weights("new"))
    assert (path / "model.txt").read_text() == "new"
    renames = [call for call in trace.calls if call.startswith("rename")]
    assert renames == ["rename step-1 old", "rename tmp step-1"]
    assert hidden_in(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ZeroDivisionError(), KeyboardInterrupt()])
def test_a_writer_that_fails_leaves_what_was_there(tmp_path, error):
    writer.publish(tmp_path, "step-1", weights("old"))

    def fails(folder):
        weights("half")(folder)
        raise error

    with pytest.raises(CheckpointError if isinstance(error, OSError) else type(error)):
        writer.publish(tmp_path, "step-1", fails)
    assert manifest.check(tmp_path / "step-1")
    assert (tmp_path / "step-1" / "model.txt").read_text() == "old"
    assert hidden_in(tmp_path) == []


def test_when_the_last_rename_fails_the_old_folder_comes_back(tmp_path, monkeypatch):
    writer.publish(tmp_path, "step-1", weights("old"))

    class Refuses(writer.FileOps):
        def rename(self, source, target):
            if source.name.startswith(".tmp-"):
                raise OSError(5, "Input/output error")
            super().rename(source, target)

    monkeypatch.setattr(writer, "ops", Refuses())
    with pytest.raises(CheckpointError, match="Input/output error"):
        writer.publish(tmp_path, "step-1", weights("new"))
    assert (tmp_path / "step-1" / "model.txt").read_text() == "old"
    assert hidden_in(tmp_path) == []


def test_a_file_hashed_while_written_is_not_read_again(tmp_path, monkeypatch):
    read = []
    measure = writer.measure
    monkeypatch.setattr(writer, "measure", lambda path: read.append(path.name) or measure(path))

    def write(folder):
        (folder / "plain").write_bytes(b"1")
        return {"streamed": writer.write_file(folder / "streamed", [b"ab", memoryview(b"cd"), b""])}

    path = writer.publish(tmp_path, "step-1", write)
    assert read == ["plain"]
    assert manifest.check(path).files["streamed"] == FileRecord(4, hashlib.sha256(b"abcd").hexdigest())


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda folder: None, "not written"),
        (lambda folder: {"gone": FileRecord(1, "0" * 64)}, "gone"),
        (lambda folder: (folder / "a").write_bytes(b"1") and {"a": FileRecord(2, "0" * 64)}, "a has 1 bytes"),
        (lambda folder: (folder / "a").symlink_to("/etc/passwd"), "plain files only"),
    ],
)
def test_a_writer_that_did_not_write_what_it_says_publishes_nothing(tmp_path, write, message):
    with pytest.raises(CheckpointError, match=message):
        writer.publish(tmp_path, "step-1", write)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_said_before_the_first_byte(tmp_path):
    with pytest.raises(CheckpointError, match="the disk has") as caught:
        writer.publish(tmp_path, "step-1", lambda folder: pytest.fail("wrote"), expected_bytes=1 << 60)
    assert "free space" in caught.value.fix


def test_sweeping_restores_a_folder_caught_between_the_two_renames_and_touches_nothing_else(tmp_path):
    writer.publish(tmp_path, "checkpoint-1", weights("kept"))
    (tmp_path / "checkpoint-1").rename(writer.hidden(tmp_path, "old", "checkpoint-1"))
    writer.publish(tmp_path, "checkpoint-2", weights("new"))
    for kind, name in [("old", "checkpoint-2"), ("tmp", "checkpoint-3"), ("del", "checkpoint-0"), ("tmp", "export")]:
        weights("x")(_made(writer.hidden(tmp_path, kind, name)))
    _made(tmp_path / ".tmp-checkpoint-mine")
    writer.sweep(tmp_path, "checkpoint-*")
    assert (tmp_path / "checkpoint-1" / "model.txt").read_text() == "kept"
    assert (tmp_path / "checkpoint-2" / "model.txt").read_text() == "new"
    left = sorted(hidden_in(tmp_path))
    assert len(left) == 2
    assert left[0] == ".tmp-checkpoint-mine"
    assert left[1].startswith(".tmp-export-")


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_discarding_hides_the_folder_before_it_deletes(tmp_path, trace):
    writer.publish(tmp_path, "step-1", weights("a"))
    trace.calls.clear()
    writer.discard(tmp_path / "step-1")
    assert trace.calls[:2] == ["rename step-1 del", f"sync {tmp_path.name}"]
    assert sorted(trace.calls[2:]) == sorted(
        ["unlink model.txt", "unlink state.json", f"unlink {MANIFEST}", "rmdir sub", "rmdir del"]
    )
    assert list(tmp_path.iterdir()) == []


def test_the_background_saver_runs_one_job_at_a_time_and_keeps_its_error_for_the_next_check():
    saver, running, most = writer.AsyncSaver(), [], []

    def job():
        running.append(1)
        most.append(len(running))
        time.sleep(0.02)
        running.pop()

    for _ in range(3):
        saver.start(job)
    saver.wait()
    assert most == [1, 1, 1]

    release = threading.Event()

    def fails():
        release.wait(60)
        raise CheckpointError("the disk is gone")

    saver.start(fails)
    saver.check()  # still running: nothing to say yet
    assert saver.busy
    release.set()
    with pytest.raises(CheckpointError, match="the disk is gone"):
        saver.wait()
    saver.check()  # said once


def test_tensor_files_are_hashed_while_written_and_read_again_only_if_changed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    plain = writer.measure
    monkeypatch.setattr(writer, "measure", lambda path: (read.append(path.name), plain(path))[1])

    def write(folder: Path) -> None:
        write_shards(folder, "model", [(f"w{k}", torch.full((64, 64), float(k))) for k in range(4)], 4e-5)
        write_shards(folder, "changed", [("w", torch.zeros(8))])
        with (folder / "changed.safetensors").open("r+b") as file:
            file.seek(-4, 2)
            file.write(b"\x00\x00\x80\x3f")

    folder = writer.publish(tmp_path, "checkpoint-1", write)
    assert read == ["changed.safetensors", "model.safetensors.index.json"]
    manifest.check(folder, "full")
    with safe_open(folder / "model-00002-of-00002.safetensors", "pt") as file:
        assert file.get_tensor("w3").eq(3).all()
        assert file.metadata() == {"format": "pt"}


def test_a_slow_hash_holds_few_pieces_in_memory_however_large_a_chunk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_PIECE", 10)
    true, data, waiting = hashlib.sha256, [bytes([k]) * 250 for k in range(4)], []

    class Slow:
        def __init__(self) -> None:
            self.digest, self.done = true(), 0

        def update(self, piece: memoryview) -> None:
            time.sleep(0.002)
            waiting.append((tmp_path / "file").stat().st_size - self.done)
            self.digest.update(piece)
            self.done += len(piece)

        def hexdigest(self) -> str:
            return self.digest.hexdigest()

    monkeypatch.setattr(writer.hashlib, "sha256", Slow)
    record = writer.write_file(tmp_path / "file", data)
    assert (tmp_path / "file").read_bytes() == b"".join(data)
    assert record.sha256 == true(b"".join(data)).hexdigest()
    assert 10 < max(waiting) <= 100, "it was slower than the writing, and eight pieces and two under way are all"
