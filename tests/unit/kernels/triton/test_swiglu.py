"""The SwiGLU kernels, in Triton's interpreter, against kernels/swiglu.py."""

from __future__ import annotations

import pytest
import torch

from erniekit.kernels.swiglu import pairs, reference

pytest.importorskip("triton", reason="the dev extra installs it on Linux")

from erniekit.kernels.triton import swiglu as kernels


@pytest.mark.parametrize(("rows", "width"), [(3, 2100), (1, 1), (5, 64)])
def test_both_ways_equal_the_reference_at_any_width(rows: int, width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 2 * width, requires_grad=True)
    want = reference(x)
    grad = torch.randn_like(want)
    want.backward(grad)
    y, back = torch.empty_like(want), torch.empty_like(x)
    kernels.forward[kernels.grid(rows, width)](x.detach(), y, width, BLOCK=kernels.BLOCK)
    kernels.backward[kernels.grid(rows, width)](grad, x.detach(), back, width, PAIRED=False, BLOCK=kernels.BLOCK)
    torch.testing.assert_close(y, want.detach())
    torch.testing.assert_close(back, x.grad)
    back.zero_()
    paired = pairs(x.detach())
    kernels.backward[kernels.grid(rows, width)](grad, paired, back, width, PAIRED=True, BLOCK=kernels.BLOCK)
    torch.testing.assert_close(back, x.grad, msg="of gates beside their ups")
