"""Blocks of weights: the bytes of the gguf package's own quantisers, and what a type cannot hold is refused."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from erniekit.export.gguf.blocks import Unstorable, decode, encode

WORDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "MXFP4"]


def weights(scale: float) -> torch.Tensor:
    """Gaussian; with zeros, ties between two codes, both signs of the same largest size, and powers of two."""
    out = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * scale
    out[0, :32] = 0.0
    out[0, 32:64] = -0.0
    out[1, :6] = torch.tensor([127.0, 0.5, -0.5, 1.5, 126.5, -2.5]) * scale
    out[2, :32] = torch.tensor([12.0, 0.5, 1.5, -2.5, 3.5, 5.0, -7.0, 10.0] * 4) * scale
    out[3, :32] = torch.tensor([8.0, -8.0] * 16) * scale
    out[4] = out[4].sign() * 2.0 ** out[4].abs().log2().round().clamp(-60)
    return out


@pytest.mark.parametrize("scale", [1.0, 0.02, 1e-6])
@pytest.mark.parametrize("word", WORDS)
def test_a_type_has_the_bytes_and_the_numbers_of_the_gguf_package(word: str, scale: float) -> None:
    given = weights(scale)
    wanted = gguf.quants.quantize(given.numpy(), gguf.GGMLQuantizationType[word]).view(np.uint8)
    got = encode(given, word)
    assert got.dtype == torch.uint8
    np.testing.assert_array_equal(got.numpy(), wanted)
    back = gguf.quants.dequantize(wanted, gguf.GGMLQuantizationType[word])
    np.testing.assert_array_equal(decode(got, word).numpy(), back)


@pytest.mark.parametrize("word", ["Q8_0", "Q4_0", "MXFP4"])
def test_sixteen_bit_weights_are_quantised_as_their_fp32_values(word: str) -> None:
    given = weights(0.02).to(torch.bfloat16)
    assert torch.equal(encode(given, word), encode(given.float(), word))


def test_a_number_just_below_a_half_is_not_rounded_up() -> None:
    below = float(torch.tensor(0.5).nextafter(torch.zeros(())))
    given = torch.zeros(1, 32)
    given[0, :3] = torch.tensor([127.0, below, -below])
    assert encode(given, "Q8_0")[0, 2:5].tolist() == [127, 0, 0]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("word", WORDS)
def test_inf_and_nan_are_refused(word: str, bad: float) -> None:
    given = torch.ones(2, 64)
    given[1, 40] = bad
    with pytest.raises(Unstorable):
        encode(given, word)


@pytest.mark.parametrize(("word", "largest"), [("F16", 65504.0), ("Q8_0", 65504.0 * 127), ("Q4_0", 65504.0 * 8)])
def test_a_weight_beyond_half_precision_is_refused_and_the_largest_is_not(word: str, largest: float) -> None:
    encode(torch.full((1, 32), largest), word)
    with pytest.raises(Unstorable):
        encode(torch.full((1, 32), largest * 1.01), word)
