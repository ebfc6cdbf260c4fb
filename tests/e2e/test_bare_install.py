"""`make wheel` in a bare environment: install, demo, uninstall; then nothing of ours is left, in it or at home."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.version import __version__
from support.built import make_wheel

pytestmark = pytest.mark.full


def files_under(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def test_the_wheel_installs_runs_its_demo_and_uninstalls_without_a_trace(tmp_path: Path, root: Path):
    home, tools, work, venv = (tmp_path / name for name in ("home", "tools", "work", "venv"))
    for folder in (home, tools, work):
        folder.mkdir()
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "ERNIEKIT", "TRITON"))}
    env = {**kept, "HOME": str(home), "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    env.pop("TORCHINDUCTOR_CACHE_DIR", None)

    def run(*words: str | Path, **more: str) -> str:
        done = subprocess.run(words, cwd=work, env={**env, **more}, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    wheel = make_wheel(tmp_path).wheel
    # pip asks other programs for their versions, and they write into the home folder they find.
    found = os.environ.get("PIP_CONFIG_FILE", str(Path("~/.config/pip/pip.conf").expanduser()))
    settings = {"HOME": str(tools), "PIP_CONFIG_FILE": found}
    run(sys.executable, "-m", "venv", venv, **settings)
    pip = (venv / "bin" / "python", "-m", "pip", "--quiet", "--no-cache-dir", "--disable-pip-version-check")
    run(*pip, "install", "-c", root / "constraints.txt", wheel, **settings)
    before = files_under(venv)
    assert [name for name in before if name.endswith("bin/erniekit")]
    assert f"version : {__version__}" in run("erniekit", "version")
    assert "every proof holds" in run("erniekit", "demo")
    run(*pip, "uninstall", "--yes", "erniekit-torch", **settings)
    assert sorted(name for name in files_under(venv) if "erniekit" in name.lower()) == []
    assert sorted(files_under(home)) == []
    assert {path.name for path in work.iterdir()} == {"erniekit-demo"}  # the demo's results, the user's to keep
