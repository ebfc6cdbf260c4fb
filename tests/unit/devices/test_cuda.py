"""What is done for an NVIDIA card and can be seen without one."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import sys
import torch
from erniekit.devices.cuda import gradients_as_given

x = torch.randn(3, requires_grad=True)
with gradients_as_given():
    (found,) = torch.autograd.grad([x * 2], [x], [torch.tensor([1.0, 2.0, 3.0])])
    (x * x).sum().backward()  # none is given
print(found.tolist() == [2.0, 4.0, 6.0], torch.equal(x.grad, 2 * x), "sympy" in sys.modules)
try:
    torch.autograd.grad([x * 2], [x], [torch.ones(4)])
except RuntimeError as error:
    print("Mismatch in shape" in str(error), "sympy" in sys.modules)
"""


def test_gradients_that_recording_hands_over_are_taken_without_an_import_of_the_compiler() -> None:
    """In a process of its own; behind it torch compares shapes again, which is what imports it."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["True True False", "True True"], done.stderr
