"""A test file's checks of Triton kernels in Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys


def run_interpreted(file: str) -> None:
    """`file` in a process of its own, as `__name__ == "interpreted"`."""
    code = f"import runpy; runpy.run_path({file!r}, run_name='interpreted')"
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
