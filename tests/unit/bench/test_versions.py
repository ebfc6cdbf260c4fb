"""benchmarks/versions.py: two versions of the source measured in turns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def versions(*words: object) -> subprocess.CompletedProcess[str]:
    script = ROOT / "benchmarks" / "versions.py"
    return subprocess.run([sys.executable, script, *map(str, words)], capture_output=True, text=True)


def test_a_folder_without_a_version_is_refused(tmp_path: Path) -> None:
    ran = versions(tmp_path)
    assert ran.returncode == 2
    assert f"{tmp_path} holds no erniekit" in ran.stderr


@pytest.mark.full
def test_each_version_is_the_one_that_runs(tmp_path: Path) -> None:
    other = tmp_path / "src"
    other.mkdir()
    for made in (ROOT / "src").iterdir():
        if made.name == "erniekit":
            (other / "erniekit").symlink_to(made)
    same = versions(other, "--only", "A1", "--turns", "1", "--steps", "2", "--tiny", "--allowed", "0.9", "--profile")
    assert same.returncode == 0, same.stderr
    assert same.stdout.startswith("A1 ")
    assert "times" in same.stdout
    heading, total = same.stdout.splitlines()[1:3]
    assert heading.split() == ["ms", "of", "a", "step", "before", "now", "more"]
    before, now, more = map(float, total.removeprefix("  all kernels").split())
    assert min(before, now) > 0
    assert more == pytest.approx(now - before, abs=0.011)
    (other / "erniekit").unlink()
    (other / "erniekit").mkdir()
    (other / "erniekit" / "__init__.py").write_text("raise RuntimeError('the other version')\n")
    broken = versions(other, "--only", "A1", "--turns", "1", "--tiny")
    assert broken.returncode == 1
    assert "the other version" in broken.stderr
