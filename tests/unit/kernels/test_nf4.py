"""NF4 against bitsandbytes' CPU functions."""

from __future__ import annotations

import bitsandbytes.functional as theirs
import pytest
import torch

from erniekit.kernels import nf4


def weight(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(4)
    w = torch.distributions.StudentT(3.0).sample((96, 512)) * 0.02
    w[3] = 0
    w[5, :64] = 0
    return w.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_absmax_and_decoded_numbers_are_those_of_bitsandbytes_bit_for_bit(dtype: torch.dtype) -> None:
    w = weight(dtype)
    packed, state = theirs.quantize_4bit(w, blocksize=nf4.BLOCK, quant_type="nf4")
    codes, absmax = nf4.encode(w)
    assert torch.equal(codes.flatten(), packed.flatten())
    assert torch.equal(absmax.flatten(), state.absmax)
    assert torch.equal(nf4.decode(codes, absmax, dtype), theirs.dequantize_4bit(packed, state))


def test_a_weight_of_several_chunks_is_encoded_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight()
    whole = nf4.encode(w)
    decoded = nf4.decode(*whole, torch.bfloat16)
    monkeypatch.setattr(nf4, "CHUNK", 640)
    assert all(torch.equal(a, b) for a, b in zip(nf4.encode(w), whole, strict=True))
    assert torch.equal(nf4.decode(*whole, torch.bfloat16), decoded)


def test_double_quantisation_is_that_of_bitsandbytes_but_for_the_codes_it_does_not_round_to_the_nearest() -> None:
    absmax = torch.rand(96 * 1000 + 77, generator=torch.Generator().manual_seed(0)) * 0.1
    offset = absmax.mean()
    codes, state = theirs.quantize_blockwise(absmax - offset, blocksize=nf4.NESTED_BLOCK)
    ours = nf4.encode_absmax(absmax)
    assert torch.equal(ours.scale, state.absmax)
    assert torch.equal(ours.offset, offset)
    assert torch.equal(nf4.dynamic_table(signed=True), state.code)
    # Their CPU kernel looks codes up in a table of coarser steps and takes a neighbour now and then.
    other = codes != ours.codes
    assert other.float().mean() < 2e-3
    mine, their = nf4.decode_absmax(ours), nf4.decode_absmax(ours._replace(codes=codes))
    assert torch.equal(their, theirs.dequantize_blockwise(codes, state) + offset)
    assert ((mine - absmax).abs() <= (their - absmax).abs())[other].all()


def test_unsigned_dynamic_numbers_are_those_of_bitsandbytes() -> None:
    assert torch.equal(nf4.dynamic_table(signed=False), theirs.create_dynamic_map(signed=False))


def test_a_weight_that_is_no_whole_number_of_blocks_is_that_of_bitsandbytes_too() -> None:
    w = torch.randn(100, 90)
    packed, state = theirs.quantize_4bit(w, blocksize=nf4.BLOCK, quant_type="nf4")
    codes, absmax = nf4.encode_flat(w)
    assert torch.equal(absmax, state.absmax)
    assert torch.equal(codes, packed.flatten())
    decoded = nf4.decode_flat(codes, absmax, w.numel(), torch.float32).view(w.shape)
    assert torch.equal(decoded, theirs.dequantize_4bit(packed, state))


def test_an_odd_number_of_weights_takes_half_a_byte_more() -> None:
    w = torch.tensor([[-1.0, 1.0, 0.0]])
    codes, absmax = nf4.encode_flat(w)
    assert (codes.numel(), absmax.tolist()) == (2, [1.0])
    assert torch.equal(nf4.decode_flat(codes, absmax, 3, torch.float32), w[0])
