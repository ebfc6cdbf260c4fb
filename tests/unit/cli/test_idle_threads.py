"""OpenMP's threads of a command sleep while they wait."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from erniekit.cli.idle_threads import WAITS, let_threads_sleep


def test_threads_of_a_command_sleep_while_they_wait_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two runs on two cores wait for each other's threads else. That it is set before torch: what a command printed."""
    for name in WAITS:
        monkeypatch.delenv(name, raising=False)
    code = (
        "import os, sys; from erniekit.cli import main; sys.argv = ['erniekit', '--version']; main.main(); "
        "print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split()[-2:] == ["PASSIVE", "False"]
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    let_threads_sleep()
    assert "OMP_WAIT_POLICY" not in os.environ
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    let_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
