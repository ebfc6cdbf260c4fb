"""`erniekit doctor` on devices that raise where they are asked: it says so, goes on, and exits with 1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHIP = """
from erniekit.devices.base import GIB, Device


class Chip(Device):
    vendor = "chip"
    {says}


def present():
    {present}


def count():
    {count}


def make():
    return Chip("Chip 9", "cpu", 8 * GIB)


def findings():
    {findings}
"""
WELL = {"says": "", "present": "return True", "count": "return 1", "findings": "return []"}


@pytest.fixture
def kits(tmp_path: Path) -> Path:
    for name, changed in {
        "well": {},
        "unseen": {"present": "raise OSError('driver exploded')"},
        "unwell": {"count": "raise OSError('no count')", "findings": "raise OSError('no tool')"},
        "bold": {"says": "asynchronous = True"},
    }.items():
        (tmp_path / f"chip_{name}.py").write_text(CHIP.format(**{**WELL, **changed}))
    return tmp_path


def doctor(kits: Path, names: str, *words: str) -> tuple[int, str]:
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{kits}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "ERNIEKIT_DEVICES": ",".join(f"{name}=chip_{name}" for name in names.split()),
    }
    command = [sys.executable, "-m", "erniekit", "doctor", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_a_device_that_cannot_say_whether_it_is_here_is_a_finding_and_the_others_are_looked_at(kits: Path) -> None:
    code, said = doctor(kits, "unseen well")
    assert code == 1
    assert "unseen: not known whether it is here" in said
    assert "its present() raised OSError: driver exploded" in said
    assert "well: 1 here" in said
    assert "Chip 9" in said, "the next one was tried"


@pytest.mark.full
def test_findings_and_a_count_that_raise_are_findings_and_the_device_is_named_all_the_same(kits: Path) -> None:
    code, said = doctor(kits, "unwell", "device=unwell")
    assert code == 1
    assert "unwell: here" in said
    assert "chip_unwell, named by ERNIEKIT_DEVICES" in said
    assert "its findings() raised OSError: no tool" in said
    assert said.count("its count() raised OSError: no count") == 1
    assert "all that it claims works" not in said


def test_a_device_that_is_refused_is_a_finding_with_what_to_write(kits: Path) -> None:
    code, said = doctor(kits, "bold", "device=bold")
    assert code == 1
    assert "Chip says asynchronous and has no synchronise()" in said
    assert "fix: write what is missing, or leave asynchronous False: row `asynchronous`" in said
    assert "the process ended" not in said
