"""A test file's checks of Triton kernels in Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any


def run_interpreted(file: str) -> None:
    """`file` in a process of its own, as `__name__ == "interpreted"`."""
    code = f"import runpy; runpy.run_path({file!r}, run_name='interpreted')"
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def bound_loops_by_numbers_on_the_device() -> None:
    """Triton 3.6 takes int() of an array of one element, which numpy 2.4 refuses: in this process it no longer does."""
    import triton.runtime.interpreter as interpreter

    usual = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        usual(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
