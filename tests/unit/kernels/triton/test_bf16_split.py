"""The kernel that splits an fp32 matrix into bf16 parts, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the dev extra installs it on Linux")

from erniekit.kernels import router_logits


@pytest.mark.parametrize("which", [(0, 1, 2), (0, 1, 0), (0, 0, 1)])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_lie_as_they_do_when_torch_splits_and_joins_them(which: tuple[int, int, int], dim: int) -> None:
    from erniekit.kernels.triton import bf16_split

    torch.manual_seed(0)
    value = torch.randn(37, 50) * torch.logspace(-6, 6, 50)
    got, want = bf16_split.side_by_side(value, which, dim), router_logits.side_by_side(value, which, dim)
    assert got.shape == want.shape
    # The interpreter cuts where a card rounds, so that a part is off by a bit and the next one makes up for it.
    assert ((got.float() - want.float()).abs() <= torch.cat([value.abs()] * 3, dim) * 2**-7).all()
    if which == (0, 1, 2):
        summed = got.double().view(3, 37, 50).sum(0) if dim == 0 else got.double().view(37, 3, 50).sum(1)
        torch.testing.assert_close(summed, value.double(), rtol=2**-21, atol=0)


def test_a_matrix_that_lies_across_is_split_as_it_reads() -> None:
    from erniekit.kernels.triton import bf16_split

    value = torch.arange(12.0).view(3, 4).t()
    assert torch.equal(bf16_split.side_by_side(value, (0, 0, 0), 0).float(), torch.cat([value] * 3))
