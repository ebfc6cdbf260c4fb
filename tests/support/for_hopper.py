"""Kernels compiled for a Hopper card that is not here: Triton's interpreter, in which tests run them, takes what its
compiler refuses (kinds of branches, types that differ)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BEGIN = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def built(kernel, kinds, fixed, warps=4):
    # kinds: of arguments, by name, "*bf16" of a pointer. Pointers and integers are taken to be multiples of 16.
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else kinds[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] in "*i"}
    source = ASTSource(kernel, signature, constexprs=fixed, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm
"""


def run_for_hopper(code: str, cache: Path) -> str:
    """What `code` prints in a process that compiles: `built(kernel, kinds, fixed, warps)` is there for it."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", BEGIN + code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
