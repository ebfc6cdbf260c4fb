"""The kernels that make rows fp8 and take them by expert, in Triton's interpreter, against what they are in torch."""

from __future__ import annotations

import os

import pytest
import torch

from erniekit.kernels import expert_fp8, fp8_product
from erniekit.kernels.moe_permute import by_expert

pytest.importorskip("triton", reason="the dev extra installs it on Linux")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a card, tests/device has these")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide", [8192, 16])  # 16: rows longer than what a program holds
def test_rows_of_any_width_and_lying_apart(dtype: torch.dtype, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from erniekit.kernels.triton import fp8_rows

    monkeypatch.setattr(fp8_rows, "WIDE", wide)
    torch.manual_seed(0)
    whole = (torch.randn(2, 3, 37) * torch.logspace(-9, 9, 6).view(2, 3, 1)).to(dtype)
    whole[1, 2] = 0
    for x in (whole, whole[0], whole[0][:, 3:20], whole.transpose(1, 2), whole[:0]):
        (got, scale), (want, right) = fp8_rows.quantise(x), fp8_product.reference(x)
        assert (got.shape, scale.shape) == (want.shape, right.shape)
        torch.testing.assert_close(scale, right, rtol=1e-6, atol=0)
        # The interpreter rounds ties up, loses the carry to a power of two, and cuts the smallest numbers.
        off, size = (got.float() - want.float()).abs(), want.float().abs()
        carried = size.log2() % 1 == 0
        assert (off[~carried] <= (size / 8).clamp(min=2**-9)[~carried]).all()
        assert (off[carried] <= (size / 2)[carried]).all()


@pytest.mark.parametrize(("width", "ranks"), [(32, (3, 16)), (40, (5,)), (32, ())])
def test_taken_rows_are_the_tokens_bytes_and_low_ranks_are_of_the_tokens_as_they_were(
    width: int, ranks: tuple[int, ...]
) -> None:
    from erniekit.kernels.triton import expert_rows

    torch.manual_seed(0)
    order = by_expert(torch.randint(0, 5, (9, 2)), 7)  # the last two are nobody's choice
    x = torch.randn(9, width)
    lows = [(torch.randn(7, rank, width), 0.5 + rank) for rank in ranks]
    small = fp8_product.reference(x)
    (got, scale), low = expert_rows.take_fp8(x, small, order.row_of, 2, order.ends, lows)
    (want, right), want_low = expert_fp8.take(x, small, order.row_of, 2, order.ends, lows)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scale, right)
    torch.testing.assert_close(low, want_low, atol=1e-4, rtol=1e-4)
    assert low.shape == (18, sum(ranks))
