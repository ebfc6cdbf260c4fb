"""What a process prints depends on its rank, which a variable says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.log import drop_stray_rank


def test_a_rank_of_no_world_is_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    env = {"RANK": "1"}
    drop_stray_rank(env)
    assert env == {}
    assert "RANK=1 of the environment is not read" in capsys.readouterr().err
    env = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "1"}
    drop_stray_rank(env)
    assert "RANK" not in env
    assert "WORLD_SIZE names no other ranks" in capsys.readouterr().err
    for kept in ({"RANK": "0"}, {"RANK": "1", "WORLD_SIZE": "2"}, {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}):
        env = dict(kept)
        drop_stray_rank(env)
        assert env == kept
    assert capsys.readouterr().err == ""


def test_a_command_in_a_shell_with_a_rank_prints_what_it_always_prints(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"src": ["a"], "tgt": ["b"]}\n')
    ran = subprocess.run(
        [sys.executable, "-m", "erniekit", "data", rows],
        env={**os.environ, "RANK": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0
    assert "rows.jsonl" in ran.stdout
    assert "RANK=1" in ran.stderr
