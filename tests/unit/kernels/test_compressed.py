"""Scales, codes and packing against compressed-tensors' own functions, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize, fake_quantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp

from erniekit.kernels import compressed
from erniekit.quant_schemes import QUANT_RECIPES, Scheme

W4, W8 = QUANT_RECIPES["w4a16"].rest, QUANT_RECIPES["w8a16"].rest
SCHEMES = {
    "w4 group 32": replace(W4, group=32),
    "w4 group 64": replace(W4, group=64),
    "w4 group 128": W4,
    "w4 channel": W4.with_group(-1),
    "w8 channel": W8,
    "w8 group 64": W8.with_group(64),
    "w8a8": QUANT_RECIPES["w8a8"].rest,
    "fp8 static": QUANT_RECIPES["fp8_static"].rest,
    "fp8 dynamic": QUANT_RECIPES["fp8_dynamic"].rest,
    "mxfp4": QUANT_RECIPES["mxfp4"].rest,
}
EVERY = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())


def weight(dtype: torch.dtype) -> torch.Tensor:
    """Heavy tails, an outlier column, a row and a group of zeros, a tiny and a huge row."""
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(24, 256, generator=generator) * torch.rand(24, 1, generator=generator)
    w[:, 7] *= 30
    w[3], w[5, :64] = 0, 0
    w[6] *= 1e-6
    w[9] *= 1e4
    return w.to(dtype)


def args_of(scheme: Scheme) -> QuantizationArgs:
    """Made by hand from the preset's words, not from what we write into config.json."""
    mx = {"scale_dtype": torch.uint8, "zp_dtype": torch.uint8} if scheme.is_mxfp4 else {}
    return QuantizationArgs(
        num_bits=scheme.bits, type=scheme.number, strategy=scheme.strategy, group_size=scheme.group or None, **mx
    )


def their_scales(w: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    size = scheme.group or w.shape[1]
    grouped = w.unflatten(1, (-1, size))
    low, high = (w.amin(), w.amax()) if scheme.strategy == "tensor" else (grouped.amin(-1), grouped.amax(-1))
    return calculate_qparams(low, high, args_of(scheme))[0]


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_are_those_of_compressed_tensors(scheme: Scheme, dtype: torch.dtype) -> None:
    w = weight(dtype)
    ours, theirs = compressed.scales_of(w, scheme), their_scales(w, scheme)
    if scheme.is_mxfp4:
        zeros = w.unflatten(1, (-1, 32)).abs().amax(-1) == 0  # theirs are 1, ours the smallest: the codes are 0 anyway
        assert torch.equal(compressed.factors(ours, scheme)[~zeros], theirs.float()[~zeros])
        return
    assert ours.dtype == dtype
    assert torch.equal(ours, theirs.expand_as(ours))


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_those_of_compressed_tensors(scheme: Scheme, dtype: torch.dtype) -> None:
    w = weight(dtype)
    scale = compressed.scales_of(w, scheme)
    whole = compressed.factors(scale, scheme)
    theirs_scale = whole[:1, 0] if scheme.strategy == "tensor" else whole
    args = args_of(scheme)
    ours = compressed.encode(w, scale, scheme)
    kind = BaseCompressor.get_value_from_registry(scheme.format)
    stored = kind.compress(
        {"weight": w.float(), "weight_scale": theirs_scale}, QuantizationScheme(targets=["Linear"], weights=args)
    )
    theirs = stored.get("weight_packed", stored.get("weight"))
    assert ours.dtype == theirs.dtype
    same = ours.view(torch.uint8) == theirs.view(torch.uint8)
    assert same.all(), f"{int((~same).sum())} of {same.numel()} bytes differ"


@EVERY
def test_decoded_weights_are_those_of_compressed_tensors(scheme: Scheme) -> None:
    w = weight(torch.bfloat16)
    scale = compressed.scales_of(w, scheme)
    codes = compressed.encode(w, scale, scheme)
    ours = compressed.decode(codes, scale, scheme, w.shape[1], torch.bfloat16)
    kind = BaseCompressor.get_value_from_registry(scheme.format)
    state = {"weight_scale": scale[0] if scheme.strategy == "tensor" else scale, "weight_shape": torch.tensor(w.shape)}
    state["weight_packed" if "pack" in scheme.format else "weight"] = codes
    theirs = kind.decompress(state, QuantizationScheme(targets=["Linear"], weights=args_of(scheme)))["weight"]
    assert torch.equal(ours, theirs.to(torch.bfloat16))


@EVERY
def test_a_weight_that_was_rounded_is_stored_exactly(scheme: Scheme) -> None:
    w = weight(torch.bfloat16)
    scale = compressed.scales_of(w, scheme)
    on_grid = compressed.rounded(w, scale, scheme)
    exact = scale if scheme.is_mxfp4 else scale.float()
    stored = compressed.encode(on_grid, scale, scheme)
    assert torch.equal(compressed.decode(stored, exact, scheme, 256, torch.float32), on_grid)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [64, 72, 35])
def test_words_are_packed_and_unpacked_as_compressed_tensors_does(bits: int, columns: int) -> None:
    low = -(2 ** (bits - 1))
    codes = torch.randint(low, -low, (5, columns), generator=torch.Generator().manual_seed(bits)).to(torch.int8)
    words = compressed.pack_words(codes, bits)
    assert torch.equal(words, pack_to_int32(codes, bits))
    assert torch.equal(compressed.unpack_words(words, bits, columns), codes)
    assert torch.equal(unpack_from_int32(words, bits, codes.shape), codes)


def test_experts_that_lie_end_to_end_have_a_tensor_scale_each() -> None:
    scheme, w = SCHEMES["fp8 static"], weight(torch.float32)
    apart = torch.cat([compressed.scales_of(part, scheme) for part in w.split(8)])
    assert torch.equal(compressed.scales_of(w, scheme, parts=3), apart)
    assert len(apart.unique()) == 3


@pytest.mark.parametrize("name", ["w8a8", "fp8 dynamic"])
def test_activations_are_rounded_token_by_token_as_compressed_tensors_does(name: str) -> None:
    scheme, x = SCHEMES[name], weight(torch.float32)[None]
    args = QuantizationArgs(num_bits=8, type=scheme.number, strategy="token", dynamic=True)
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Module())
    assert torch.equal(compressed.rounded_inputs(x, scheme), fake_quantize(x, scale, zero, args))


def test_activations_are_rounded_by_a_stored_scale_as_compressed_tensors_does() -> None:
    scheme, x = SCHEMES["fp8 static"], weight(torch.float32)
    args = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
    scale = compressed.input_scale(x.abs().max(), scheme, torch.float32)
    assert torch.equal(scale, calculate_qparams(x.amin(), x.amax(), args)[0])
    codes = quantize(x, scale, None, args, dtype=torch.float8_e4m3fn)
    assert torch.equal(compressed.rounded_inputs(x, scheme, scale), dequantize(codes, scale, None, args))
