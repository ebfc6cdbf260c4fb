"""The sum over a key's places, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the dev extra installs it on Linux")

from erniekit.kernels.packed_attention import places_of
from erniekit.kernels.triton.shared_keys import sum_places


def test_gradients_of_a_shared_key_are_added_and_rows_past_the_lists_are_never_read() -> None:
    torch.manual_seed(0)
    index = torch.tensor([0, 1, 2, 3, 0, 1, 4, 5])
    rows = torch.randn(12, 3, 5)
    rows[len(index) :] = float("nan")
    want = torch.zeros(7, 3, 5).index_add_(0, index, rows[: len(index)])
    torch.testing.assert_close(sum_places(rows, places_of(index, 7)), want)
