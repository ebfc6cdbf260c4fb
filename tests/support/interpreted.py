"""A test file's checks of Triton kernels in Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from typing import Any


def run_interpreted(file: str) -> None:
    """`file` as `__name__ == "interpreted"`: here if Triton interprets (conftest.py), else in a process of its own."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        patch_once_per_launch()
        runpy.run_path(file, run_name="interpreted")
        return
    ready = "import support.interpreted as it; it.patch_once_per_launch()"
    code = f"{ready}; import runpy; runpy.run_path({file!r}, run_name='interpreted')"
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


def patch_once_per_launch() -> None:
    """Triton's interpreter replaces triton.language anew in each call of a device function, thousands in a launch and
    a third of its time: in this process it does so once per launch for each set of modules that a function sees."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    if hasattr(interpreter, "patched_modules"):  # by an earlier test
        return
    usual, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[frozenset[str]] = set()
    modules: dict[Any, frozenset[str]] = {}
    interpreter.patched_modules = patched

    def patch(fn: Any) -> Any:
        if fn not in modules:
            seen = {"tl": tl, "core": tl.core}
            modules[fn] = frozenset(name for name, it in seen.items() if any(v is it for v in fn.__globals__.values()))
        if modules[fn] in patched:
            return interpreter._LangPatchScope()
        patched.add(modules[fn])
        return usual(fn)

    def begin(self: Any, *args: Any, **options: Any) -> Any:
        patched.clear()  # a launch restores everything at its end
        return launch(self, *args, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch, begin
