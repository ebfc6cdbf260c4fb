"""Products of experts in fp8 with low-rank updates in the same pass, in Triton's interpreter, against their pieces."""

from __future__ import annotations

import os

import pytest
import torch

from erniekit.kernels import expert_reference, fp8_product, quantised_rows

pytest.importorskip("triton", reason="the dev extra installs it on Linux")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a card, tests/device has these")


@pytest.mark.parametrize("ranks", [(), (4,), (16, 3)])
@pytest.mark.parametrize("scaled", [True, False])
def test_products_with_scales_and_updates_are_those_of_their_pieces(
    ranks: tuple[int, ...], scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from erniekit.kernels.triton import fp8_grouped

    monkeypatch.setattr(fp8_grouped, "PRODUCT", fp8_grouped.Shape(16, 16, 32, 4, 1))
    torch.manual_seed(0)
    ends, (K, N) = torch.tensor([3, 3, 20, 37], dtype=torch.int32), (64, 48)  # an expert without rows, one row too many
    rows, row_scale = quantised_rows.reference(torch.randn(38, K))
    image, scale = quantised_rows.reference(torch.randn(4, N, K))
    tails = [(torch.randn(38, n), torch.randn(4, n, N)) for n in ranks]  # the interpreter multiplies no bf16
    by = scale if scaled else None
    got = fp8_grouped.grouped(rows, row_scale, image, by, ends, tails, 0.5)
    want = fp8_product.grouped(rows, row_scale, image, by, ends, torch.float32)
    want = expert_reference.add_low(want, tails, 0.5, ends) if tails else want
    torch.testing.assert_close(got[:37].float(), want[:37], rtol=1e-2, atol=1e-2 * float(want.abs().max()))
