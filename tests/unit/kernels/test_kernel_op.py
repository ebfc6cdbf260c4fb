"""Operators around Triton kernels: plain ones, and for compiled layers ones that are seen into."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys, torch
from erniekit.kernels import rope_qkv, swiglu
from erniekit.kernels.kernel_op import _EVERY, see_into_kernels

x = torch.ones(2, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
swiglu._forward(x).sum().backward()
assert x.grad.shape == x.shape
see_into_kernels()  # there is no card here: nothing to be seen into
print(len(_EVERY), "torch._dynamo" in sys.modules)
"""
OPEN = """
for op in list(_EVERY):
    plain = op.called
    op.open()
    one, other = (str(each._schema) for each in (plain, op.called))
    assert one.replace(plain._schema.name, "") == other.replace(op.called._schema.name, ""), (one, other)
print(sorted(op.called._schema.name for op in _EVERY))

from torch._dynamo.backends.common import aot_autograd

graphs = []
def look(graph, inputs):
    graphs.append(graph.code)
    raise KeyboardInterrupt  # it cannot run here

@torch.compile(backend=aot_autograd(fw_compiler=look, bw_compiler=look), fullgraph=True)
def layer(x):
    return swiglu._forward(x)

try:
    layer(x)
except KeyboardInterrupt:
    pass
print("triton_kernel_wrapper" in graphs[0], "swiglu" in graphs[0])
"""


def printed(code: str) -> list[str]:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.splitlines()


def test_they_are_called_and_differentiated_without_torchs_compiler() -> None:
    assert printed(CODE) == ["4 False"]


def test_a_compiled_layer_sees_the_kernels_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the dev extra installs it on Linux")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    _, names, found = printed(CODE + OPEN)
    assert names == str([f"erniekit::{name}_seen" for name in ("swiglu_backward", "swiglu", "turn_back", "turn")])
    assert found == "True False"
