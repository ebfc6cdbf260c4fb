"""The kernels that make rows fp8 and take them by expert, in Triton's interpreter, against what they are in torch."""

from __future__ import annotations

import os

import pytest
import torch

from erniekit.kernels import expert_reference, quantised_rows
from erniekit.kernels.moe_permute import by_expert

pytest.importorskip("triton", reason="the dev extra installs it on Linux")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a card, tests/device has these")


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """The interpreter rounds ties up, loses the carry to a power of two, and cuts the smallest numbers."""
    off, size = (got.float() - want.float()).abs(), want.float().abs()
    carried = size.log2() % 1 == 0
    assert (off[~carried] <= (size / 8).clamp(min=2**-9)[~carried]).all()
    assert (off[carried] <= (size / 2)[carried]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide", [8192, 16])  # 16: rows longer than what a program holds
def test_rows_of_any_width_and_lying_apart(dtype: torch.dtype, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from erniekit.kernels.triton import fp8_rows

    monkeypatch.setattr(fp8_rows, "WIDE", wide)
    torch.manual_seed(0)
    whole = (torch.randn(2, 3, 37) * torch.logspace(-9, 9, 6).view(2, 3, 1)).to(dtype)
    whole[1, 2] = 0
    for x in (whole, whole[0], whole[0][:, 3:20], whole.transpose(1, 2), whole[:0]):
        (got, scale), (want, right) = fp8_rows.quantise(x), quantised_rows.reference(x)
        assert (got.shape, scale.shape) == (want.shape, right.shape)
        torch.testing.assert_close(scale, right, rtol=1e-6, atol=0)
        near(got, want)


@pytest.mark.parametrize(("width", "ranks"), [(32, (3, 16)), (40, (5,)), (32, ())])
def test_taken_rows_are_the_tokens_bytes_and_low_ranks_are_of_the_tokens_as_they_were(
    width: int, ranks: tuple[int, ...]
) -> None:
    from erniekit.kernels.triton import expert_rows

    torch.manual_seed(0)
    order = by_expert(torch.randint(0, 5, (9, 2)), 7)  # the last two are nobody's choice
    x = torch.randn(9, width)
    lows = [(torch.randn(7, rank, width), 0.5 + rank) for rank in ranks]
    small = quantised_rows.reference(x)
    (got, scale), low = expert_rows.take_fp8(x, small, order.row_of, 2, order.ends, lows)
    (want, right), want_low = expert_reference.take_fp8(x, small, order.row_of, 2, order.ends, lows)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scale, right)
    torch.testing.assert_close(low, want_low, atol=1e-4, rtol=1e-4)
    assert low.shape == (18, sum(ranks))


@pytest.mark.parametrize("wide", [8192, 16])
@pytest.mark.parametrize("taken", [False, True])
def test_factors_of_experts_go_into_their_rows(wide: int, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from erniekit.kernels.triton import fp8_rows

    monkeypatch.setattr(fp8_rows, "WIDE", wide)
    torch.manual_seed(0)
    ends, factor = torch.tensor([3, 3, 9, 12], dtype=torch.int32), torch.rand(4, 37) * 1e-3
    row_of = torch.randperm(14) if taken else None
    x = torch.randn(7 if taken else 14, 37)
    (got, scale), (want, right) = (
        f(x, factor, ends, row_of, 2) for f in (fp8_rows.quantise_by_expert, quantised_rows.by_expert_reference)
    )
    torch.testing.assert_close(scale[:12], right[:12], rtol=1e-6, atol=0)
    near(got[:12], want[:12])
    (got, scale), (want, right) = fp8_rows.quantise_with(x, factor[0]), quantised_rows.reference(x * factor[0])
    torch.testing.assert_close(scale, right, rtol=1e-6, atol=0)
    near(got, want)


@pytest.mark.parametrize("shape", [(3, 40, 24), (40, 24), (2, 0, 24)])
def test_matrices_are_transposed_byte_by_byte(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from erniekit.kernels.triton import fp8_rows

    monkeypatch.setattr(fp8_rows, "TILE", 16)
    image = torch.randint(0, 256, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    got = fp8_rows.transposed(image)
    assert got.is_contiguous()
    assert torch.equal(got.view(torch.uint8), image.view(torch.uint8).transpose(-2, -1))
