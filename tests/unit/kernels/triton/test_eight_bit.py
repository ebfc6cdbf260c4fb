"""The kernel that unpacks 8-bit weights, in Triton's interpreter, against the kind in torch."""

from __future__ import annotations

import os

import pytest
import torch

from erniekit.kernels.stored import kind_named

pytest.importorskip("triton", reason="the dev extra installs it on Linux")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a card, tests/device has these")


@pytest.mark.parametrize("shape", [(5, 96), (3, 2500)])
def test_numbers_are_those_of_the_definition(shape: tuple[int, int]) -> None:
    from erniekit.kernels.triton import eight_bit

    torch.manual_seed(0)
    stored = kind_named("int8").pack((torch.randn(shape) * 0.02).bfloat16())
    assert stored.scale is not None
    got = eight_bit.unpacked(stored.data, stored.scale, torch.float32)
    assert torch.equal(got, kind_named("int8").unpack(stored, torch.float32))
    by_expert = eight_bit.unpacked(stored.data[None], stored.scale[None], torch.float32)
    assert torch.equal(by_expert[0], got)


def test_a_rank_without_columns_unpacks_nothing() -> None:
    from erniekit.kernels.triton import eight_bit

    scales = torch.ones(3, 1, dtype=torch.bfloat16)
    assert eight_bit.unpacked(torch.empty(3, 0, dtype=torch.int8), scales, torch.bfloat16).shape == (3, 0)
