"""Sum and norm in one sweep: the Triton kernel as the definition."""

from __future__ import annotations

import pytest
import torch

from erniekit.kernels.add_norm import add_norm, reference
from erniekit.kernels.rms_norm import rms_norm

pytest.importorskip("triton", reason="the dev extra installs it on Linux")

from erniekit.kernels.triton import add_norm as kernels


@pytest.mark.parametrize("width", [48, 64])
@pytest.mark.parametrize("adds", [False, True])
def test_the_kernel_sums_and_normalises_as_the_definition(width: int, adds: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, width) * 4, torch.randn(width)
    added = torch.randn(5, width) if adds else None
    for mine, theirs in zip(kernels.add_norm(x, added, weight, 1e-5), reference(x, added, weight, 1e-5)):
        torch.testing.assert_close(mine, theirs)


def test_what_is_normalised_is_the_sum_as_it_is_kept() -> None:
    torch.manual_seed(1)
    x, added, weight = (torch.randn(3, 32).bfloat16() for _ in range(3))
    total, normed = add_norm(x, added, weight[0], 1e-5)
    assert torch.equal(total, x + added)
    assert torch.equal(normed, rms_norm(total, weight[0], 1e-5))
