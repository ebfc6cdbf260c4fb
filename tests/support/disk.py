"""Without the waits for the disk that a power cut would need: conftest.py, and the ranks of support/ranks.py."""

from __future__ import annotations

import os


def check_descriptor(fd: int) -> None:
    """Instead of os.fsync, which takes some milliseconds: a descriptor that is closed is still an error."""
    os.fstat(fd)


def wait_for_no_disk() -> None:
    """In this process: tests kill processes and cut no power, so what was written stays readable. Commands that tests
    start as processes do wait."""
    os.fsync = os.fdatasync = check_descriptor
