"""`make clean` removes only what make made; `make test` fails with tests or types; pre-commit runs what make runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

KEPT = ("output/model.safetensors", "vdl_log/events", "erniekit-demo/mine.txt", "erniekit-webui/jobs/1/log")


@pytest.mark.parametrize("made_by_make", [True, False])
def test_make_clean_removes_the_environment_it_made_and_no_run(tmp_path: Path, root: Path, made_by_make: bool):
    for name in ("Makefile", "constraints.txt"):
        shutil.copy(root / name, tmp_path)
    for name in (*KEPT, ".venv/bin/python", ".venv/.ready", ".ruff_cache/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    if made_by_make:
        (tmp_path / ".venv" / ".made-by-make").touch()
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    assert [name for name in KEPT if not (tmp_path / name).is_file()] == []
    assert (tmp_path / ".venv" / "bin" / "python").exists() is not made_by_make
    assert not (tmp_path / ".venv" / ".ready").exists()
    assert not (tmp_path / ".ruff_cache").exists()


@pytest.mark.parametrize(("tests", "types"), [(0, 0), (1, 0), (0, 1)])
def test_make_test_fails_with_the_tests_or_with_the_types_and_shows_what_both_said(
    tmp_path: Path, root: Path, tests: int, types: int
):
    environment = tmp_path / "venv"
    (environment / "bin").mkdir(parents=True)
    for name, code, says in (
        ("python", tests, "of tests"), ("mypy", types, "of types"), ("ruff", 0, ""), ("codespell", 0, "")
    ):  # fmt: skip
        (program := environment / "bin" / name).write_text(f"#!/bin/sh\necho {says}\nexit {code}\n")
        program.chmod(0o755)
    for made in (".runs", ".ready"):  # nothing is installed
        (environment / made).touch()
    done = subprocess.run(
        ["make", "-s", "-C", str(root), "test", f"VENV={environment}"], capture_output=True, text=True, check=False
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("of")] == ["of tests", "of types"]
    assert (done.returncode == 0) == (tests == types == 0)


def test_pre_commit_runs_the_same_checks_as_make(root: Path):
    lines = (root / "Makefile").read_text().splitlines()
    targets = [next(k for k, line in enumerate(lines) if line.startswith(f"{name}:")) for name in ("lint", "types")]
    recipes = [line for at in targets for line in lines[at + 1 : lines.index("", at)]]
    made = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipes]
    hooks = yaml.safe_load((root / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == made
    assert {hook["language"] for hook in hooks} == {"system"}
