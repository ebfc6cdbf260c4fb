"""Products of experts with low-rank updates in the same pass, in Triton's interpreter, against their pieces."""

from __future__ import annotations

import os

import pytest
import torch

from erniekit.kernels import expert_reference, fp8_product, grouped_gemm, quantised_rows

pytest.importorskip("triton", reason="the dev extra installs it on Linux")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a card, tests/device has these")


@pytest.mark.parametrize("ranks", [(), (4,), (16, 3)])
@pytest.mark.parametrize("scaled", [True, False])
def test_products_with_scales_and_updates_are_those_of_their_pieces(
    ranks: tuple[int, ...], scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from erniekit.kernels.triton import grouped_products

    monkeypatch.setattr(grouped_products, "PRODUCT", grouped_products.Shape(16, 16, 32, 4, 1))
    torch.manual_seed(0)
    ends, (K, N) = torch.tensor([3, 3, 20, 37], dtype=torch.int32), (64, 48)  # an expert without rows, one row too many
    rows, row_scale = quantised_rows.reference(torch.randn(38, K))
    image, scale = quantised_rows.reference(torch.randn(4, N, K))
    tails = [(torch.randn(38, n), torch.randn(4, n, N)) for n in ranks]  # the interpreter multiplies no bf16
    by = scale if scaled else None
    got = grouped_products.in_fp8(rows, row_scale, image, by, ends, tails, 0.5)
    want = fp8_product.grouped(rows, row_scale, image, by, ends, torch.float32)
    want = expert_reference.add_low(want, tails, 0.5, ends) if tails else want
    torch.testing.assert_close(got[:37].float(), want[:37], rtol=1e-2, atol=1e-2 * float(want.abs().max()))


@pytest.mark.parametrize("ranks", [(4,), (16, 3)])
@pytest.mark.parametrize("turned", [True, False])
def test_products_in_16_bit_with_updates_are_those_of_their_pieces(
    ranks: tuple[int, ...], turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from erniekit.kernels.triton import grouped_products

    monkeypatch.setattr(grouped_products, "PRODUCT_16", grouped_products.Shape(16, 16, 32, 4, 1))
    torch.manual_seed(0)
    ends, (K, N) = torch.tensor([3, 3, 20, 37], dtype=torch.int32), (80, 48)  # K is no multiple of a tile's depth
    rows = torch.randn(38, K)
    weight = torch.randn(4, K, N) if turned else torch.randn(4, N, K).transpose(1, 2)
    tails = [(torch.randn(38, n), torch.randn(4, n, N)) for n in ranks]
    got = grouped_gemm.grouped_product_plus(rows, weight, ends, tails, 0.5)
    want = expert_reference.add_low(grouped_gemm.product_reference(rows, weight, ends), tails, 0.5, ends)
    torch.testing.assert_close(got[:37].float(), want[:37], rtol=1e-2, atol=1e-2 * float(want.abs().max()))
