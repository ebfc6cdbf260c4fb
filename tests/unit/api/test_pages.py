"""What there is to see: `dir(erniekit)`, docstrings on all of it, the reference page, and the notebook, executed."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import erniekit
from erniekit.api import NAMES
from support import api_reference, notebook

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOK = ROOT / "examples" / "notebooks" / "first-session.ipynb"


def test_the_package_shows_its_names_and_nothing_else() -> None:
    assert [name for name in dir(erniekit) if not name.startswith("_")] == sorted(NAMES)
    assert set(NAMES) | {"__version__"} == set(erniekit.__all__)
    assert all(getattr(erniekit, name) is not None for name in NAMES)


def test_train_is_the_function_and_still_the_package_of_the_loop() -> None:
    import erniekit.train.hooks as hooks
    from erniekit.api.training import train

    assert hooks.Hook is erniekit.Hook
    assert callable(erniekit.train)
    assert inspect.signature(erniekit.train) == inspect.signature(train)
    assert erniekit.train.__doc__ == train.__doc__


def test_everything_public_has_a_docstring_and_the_reference_page_is_made_of_them() -> None:
    assert api_reference.missing() == []
    made = f"{sys.executable} tests/support/api_reference.py"
    assert api_reference.PAGE.read_text(encoding="utf-8") == api_reference.render(), f"write it again: {made}"


def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    told = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in told["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code), "it is kept without outputs"
    env = {**os.environ, "ERNIEKIT_CACHE": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, notebook.__file__, str(NOTEBOOK)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = [line.removeprefix("shown: ") for line in done.stdout.splitlines() if line.startswith("shown: ")]
    assert shown[0].startswith("['ErnieKitError'")
    assert shown[2].startswith("<table>")
    assert shown[3].startswith("<svg ")
    assert shown[-1] == "PosixPath('first-session/smoothed/export')"
    assert "Warning" not in done.stderr, done.stderr
