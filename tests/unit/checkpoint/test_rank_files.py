"""The two files of a rank that holds much: written at once, and what happens to one is known to the other."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from erniekit import heartbeat
from erniekit.checkpoint import rank_files, writer
from erniekit.checkpoint.slices import TensorFiles
from erniekit.parallel.sharding import Box
from support.clock import until

SHAPES = {"a": (12, 10), "b": (40,), "c": (16, 4)}
SECOND = "optimizer-rank-00000-of-00002-part-2.safetensors"


@pytest.fixture(autouse=True)
def two_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_files, "TWO_FROM", 1)


def parts() -> list[rank_files.Part]:
    made = []
    for name, shape in SHAPES.items():
        whole = tuple(slice(0, n) for n in shape)
        made.append((name, [Box(whole, whole)], shape, torch.rand(shape)))
    return made


def write(folder: Path, held: list[rank_files.Part] | None = None) -> list[str]:
    return sorted(rank_files.write_parts(folder, "optimizer", 0, 2, held or parts()))


@pytest.fixture
def mask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("mask")
def test_files_are_made_as_any_new_file_and_no_thread_touches_the_mask_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(mask: int) -> int:
        raise AssertionError("two threads that read the mask by changing it may leave it changed")

    with monkeypatch.context() as patched:
        patched.setattr(os, "umask", changed)
        names, held = write(tmp_path, given := parts()), TensorFiles.of_stem(tmp_path, "optimizer")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in names] == [0o640, 0o640]
    assert all(torch.equal(held.read(name), tensor) for name, _, _, tensor in given)


class Named(writer.FileOps):
    """Knows what the files are called that it writes to."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self.names[fd] = path.name
        return fd


class Slow(Named):
    """A disk that takes its time for the second file: each piece waits until the last has shown as a sign of life."""

    def __init__(self, heard: list[int]) -> None:
        super().__init__()
        self.heard, self.pieces = heard, 0

    def write(self, fd: int, data: memoryview) -> int:
        if self.names[fd] == SECOND:
            self.pieces += 1
            until(
                lambda: len(self.heard) >= self.pieces - 1, f"{self.pieces - 1} signs of life, one of each piece so far"
            )
        return super().write(fd, data[:64])


def test_a_rank_whose_first_file_failed_shows_signs_of_life_while_the_second_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its watchdog ends a rank that has an error to report."""
    (tmp_path / "optimizer-rank-00000-of-00002.safetensors").write_text("in the way")
    heard: list[int] = []
    monkeypatch.setattr(writer, "ops", slow := Slow(heard))
    monkeypatch.setattr(writer, "_PIECE", 64)
    with heartbeat.listening(lambda: heard.append(1)), pytest.raises(FileExistsError):
        write(tmp_path)
    assert slow.pieces > 4


class Full(Named):
    def __init__(self, files: str) -> None:
        super().__init__()
        self.files = files

    def write(self, fd: int, data: memoryview) -> int:
        if self.files in self.names[fd]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, data)


@pytest.mark.parametrize("files", ["of-00002.", "part-2", ""], ids=["first", "second", "both"])
def test_a_disk_that_is_full_for_either_file_or_both_fails_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: str
) -> None:
    monkeypatch.setattr(writer, "ops", Full(files))
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path)
