"""The kernel that decides whether Triton is used at all is one that Triton compiles for a card."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the dev extra installs it on Linux")

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from erniekit.devices.triton_probe import add_one

types = dict(zip(add_one.arg_names, ("*fp32", "*fp32", "i32", "constexpr"), strict=True))
built = triton.compile(ASTSource(add_one, types, constexprs={(3,): 128}), target=GPUTarget("cuda", 90, 32))
print("compiled", len(built.asm["cubin"]))
"""


def test_the_probe_compiles_for_a_card_that_is_not_here() -> None:
    """Triton's interpreter, in which other tests run kernels, takes what the compiler refuses."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env={**env, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.startswith("compiled "), done.stderr
