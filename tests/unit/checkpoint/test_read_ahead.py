"""Files that will be needed are in the system's memory before they are read."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
from pathlib import Path

import pytest

from erniekit.checkpoint import read_ahead
from erniekit.checkpoint.read_ahead import reading_ahead
from support.clock import until

SIZE = 8 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Of which nothing is in memory."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(SIZE))
    subprocess.run(["sync", str(path)], check=True)  # os.fsync does nothing in tests
    with path.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        there = share_in_memory(path)
    except OSError:
        pytest.skip("this file system does not say what is in memory")
    if there:
        pytest.skip("this file system keeps its files in memory")
    return path


def share_in_memory(path: Path) -> float:
    """Of its pages, by mincore: reads, RWF_NOWAIT ones too, may bring in what they ask for."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as opened, mmap.mmap(opened.fileno(), SIZE) as mapped:
        pages = (ctypes.c_ubyte * (SIZE // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        try:
            if libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(SIZE), pages):
                raise OSError(ctypes.get_errno(), "mincore")
        finally:
            del first  # else the map cannot be closed
    return sum(page & 1 for page in pages) / len(pages)


def test_files_are_brought_into_memory_while_something_else_is_done(file: Path) -> None:
    with reading_ahead([file, file.parent / "absent"]):
        until(lambda: share_in_memory(file) == 1, "all of it is there", 30)


def test_no_more_is_brought_in_than_there_is_room_for(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "SHARE", 0.0)
    with reading_ahead([file]):
        pass
    assert share_in_memory(file) == 0


def test_an_error_inside_ends_the_reading(file: Path) -> None:
    with pytest.raises(ValueError, match="data"), reading_ahead([file] * 1000):
        raise ValueError("data")
