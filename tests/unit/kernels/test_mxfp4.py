"""MXFP4 against compressed-tensors' own functions, and its rounding rules."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

from erniekit.kernels import mxfp4


def weight(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(3)
    return (torch.distributions.StudentT(3.0).sample((48, 256)) * 0.02).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_scales_are_those_of_compressed_tensors_bit_for_bit(dtype: torch.dtype) -> None:
    w = weight(dtype)
    codes, scales = mxfp4.encode(w)
    grouped = w.unflatten(-1, (-1, mxfp4.GROUP))
    theirs = generate_mx_scales(grouped.abs().amax(-1))
    assert torch.equal(scales.float(), theirs.float())
    values = cast_to_fp4((grouped / 2.0 ** (theirs - 127).unsqueeze(-1)).clamp(-6, 6)).flatten(-2)
    assert torch.equal(codes, pack_fp4_to_uint8(values))
    unpacked = unpack_fp4_from_uint8(codes, *w.shape, dtype=torch.float32).unflatten(-1, (-1, mxfp4.GROUP))
    expected = unpacked * 2.0 ** (theirs.float() - 127).unsqueeze(-1)
    assert torch.equal(mxfp4.decode(codes, scales, torch.float32), expected.flatten(-2))
    assert torch.equal(mxfp4.decode(codes, scales, torch.bfloat16).float(), expected.flatten(-2)), "exact in bf16"


def test_every_code_decodes_to_what_encodes_to_it() -> None:
    values = torch.tensor([*mxfp4.VALUES, *(-value for value in mxfp4.VALUES[1:]), 6.0]).repeat(2)[None] / 64
    codes, scales = mxfp4.encode(values)
    assert torch.equal(mxfp4.decode(codes, scales, torch.float32), values)


def test_ties_go_to_the_even_code_and_the_largest_is_clipped_to_six() -> None:
    row = torch.zeros(1, 32)
    row[0, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.9])
    codes, scales = mxfp4.encode(row)
    assert mxfp4.decode(codes, scales, torch.float32)[0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
    row[0, 7] = 7.0
    assert mxfp4.encode(row)[1].item() == scales.item() + 1, "from 7 on, a scale twice as large"


def test_groups_of_zeros_and_of_the_smallest_numbers_stay_finite() -> None:
    row = torch.zeros(2, 32)
    row[1] = 1e-40
    found = mxfp4.decode(*mxfp4.encode(row), torch.float32)
    assert torch.equal(found[0], row[0])
    assert found[1].abs().max() < 1e-38
