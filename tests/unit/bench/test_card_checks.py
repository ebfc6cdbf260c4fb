"""benchmarks/card_checks.py: the claims of a card measured again within a given time."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.clock import until

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "benchmarks" / "card_checks.py"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("card_checks", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "card_checks", module)
    spec.loader.exec_module(module)
    return module


def run(checks: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, scripts: dict[str, str], minutes: float) -> int:
    """main() with checks that run these scripts. Each may take twice its seconds; those that end have many."""
    named = {}
    for name, text in scripts.items():
        (file := out.parent / f"{name}.py").write_text(text, encoding="utf-8")
        named[name] = checks.CardCheck(name, 2 if name == "hangs" else 20, str(file), "it ends well")
    monkeypatch.setattr(checks, "CHECKS", named)
    monkeypatch.setattr(sys, "argv", ["card_checks.py", "--minutes", str(minutes), "--out", str(out)])
    code: int = checks.main()
    return code


def test_a_check_that_hangs_is_stopped_with_its_processes_and_the_next_one_runs(
    checks: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = tmp_path / "pid"
    hangs = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    scripts = {"hangs": hangs, "fails": "print('0.7 times')\nraise SystemExit(3)", "works": "print('1.0 times')"}
    assert run(checks, monkeypatch, tmp_path / "out", scripts, minutes=1) == 1
    told = capsys.readouterr().out
    assert "== hangs: stopped after" in told
    assert "== fails: exit code 3 after" in told
    assert "== works: exit code 0 after" in told
    assert "0.7 times" in told
    assert "1.0 times" in told
    child = int(pid.read_text())
    until(lambda: _ended(child), "the process of the one that was stopped has ended")


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_check_that_would_end_after_the_time_is_left_out_and_named(
    checks: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(checks, monkeypatch, tmp_path / "out", {"late": "print('ran')"}, minutes=0.001) == 1
    told = capsys.readouterr().out
    assert "== late: left out: it takes 20 s" in told
    assert "ran" not in told
    assert not (tmp_path / "out" / "late.log").exists()


def test_checks_run_this_checkout_whatever_is_installed(
    checks: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = "import os, erniekit\nprint(erniekit.__file__, os.getcwd())"
    assert run(checks, monkeypatch, tmp_path / "out", {"where": shown}, minutes=1) == 0
    assert f"{ROOT / 'src'}{os.sep}" in capsys.readouterr().out


def test_every_check_runs_files_that_exist(checks: ModuleType) -> None:
    for check in checks.CHECKS.values():
        for word in check.words.split():
            assert not word.endswith(".py") or (ROOT / word).is_file(), word


def test_a_name_that_is_no_check_is_refused() -> None:
    ran = subprocess.run([sys.executable, SCRIPT, "--only", "saves"], capture_output=True, text=True)
    assert ran.returncode == 2
    assert "no check 'saves': choose from versions" in ran.stderr
