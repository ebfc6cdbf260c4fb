"""Libraries that name functions for torch's compiler while they are imported: it is imported when one is called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from erniekit.kernels.lazy_compiler import compiler_on_first_use, later_compiled, later_disabled

LIBRARY = """
import inspect, torch

assert "recompile_limit" in inspect.signature(torch.compile).parameters  # else it would ask for torch._dynamo.config

@torch.compiler.disable
def kept_out(x):
    return x + 1

@torch.compiler.disable(reason="as it is")
def kept_out_too(x):
    return x + 2

constant = torch._dynamo.assume_constant_result(lambda: 3)
compiled = torch.compile(lambda x: x * 2, dynamic=False, backend="eager", recompile_limit=64)
"""
USE = """
import sys, torch
from erniekit.kernels.available import loaded
before = torch.compile, torch.compiler.disable
library = loaded("library", "kept_out")
x = torch.ones(2)
assert library.kept_out(x).tolist() == [2, 2] and library.kept_out_too(x).tolist() == [3, 3] and library.constant() == 3
print("torch._dynamo" in sys.modules, "sympy" in sys.modules)
assert (torch.compile, torch.compiler.disable) == before
assert library.compiled(x).tolist() == [2, 2]
print("torch._dynamo" in sys.modules)
frames = []
def count(graph, inputs):
    frames.append(graph)
    return graph
def around(x):
    return library.kept_out(x * 3) * 3
torch.compile(around, backend=count)(x)
print(len(frames))
"""


def test_the_compiler_is_imported_at_the_first_call_of_what_is_compiled(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(LIBRARY)
    run = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    first, second, third = run.stdout.splitlines()
    assert first == "False False"
    assert second == "True"
    assert third == "2", "a function that is kept out divides the program around it"


def test_where_the_compiler_is_there_nothing_changes() -> None:
    import torch._dynamo

    before = torch.compile, torch.compiler.disable, torch._dynamo
    with compiler_on_first_use():
        assert (torch.compile, torch.compiler.disable, torch._dynamo) == before


def test_both_are_decorators_with_and_without_arguments() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(3)
    for decorated in (later_disabled(twice), later_disabled()(twice), later_compiled(backend="eager")(twice)):
        assert torch.equal(decorated(x), twice(x))
        assert decorated.__name__ == "twice"
