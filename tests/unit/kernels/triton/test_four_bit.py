"""The kernel that unpacks 4-bit weights, in Triton's interpreter, against what the kinds are in torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from erniekit.kernels import nf4
from erniekit.kernels.stored import Stored, kind_named
from support.for_hopper import run_for_hopper

pytest.importorskip("triton", reason="the dev extra installs it on Linux")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a card, tests/device has these")

FORMATS = {"int4": "int4", "int4-group": "int4", "mxfp4": "e2m1", "nf4": "nf4"}


def packed(kind: str, experts: int, out: int, width: int) -> Stored:
    torch.manual_seed(0)
    w = torch.randn(experts * out, width) * 0.02
    w[1, :64] *= 8
    return kind_named(kind).pack(w.bfloat16()).of_experts(experts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", FORMATS)
def test_numbers_are_those_of_the_definition(kind: str, dtype: torch.dtype) -> None:
    from erniekit.kernels.triton import four_bit

    stored = packed(kind, 2, 72, 192)  # no multiples of a tile
    scale = stored.scale
    if kind == "nf4":
        assert scale is not None
        scale = nf4.dynamic_values(scale, signed=False) * stored.extra
    got = four_bit.unpacked(stored.data, FORMATS[kind], scale, dtype)
    want = kind_named(kind).unpack(stored, dtype)
    # Bit for bit; but the interpreter cuts where a card rounds to bf16.
    torch.testing.assert_close(got, want, rtol=0 if dtype == torch.float32 else 2**-7, atol=0)
    turned = four_bit.unpacked(stored.data, FORMATS[kind], scale, dtype, turned=True)
    assert torch.equal(turned, got.transpose(1, 2))


@pytest.mark.parametrize("kind", ["int4", "mxfp4"])
def test_images_in_fp8_are_those_of_the_definition_bit_for_bit(kind: str) -> None:
    from erniekit.kernels.triton import four_bit

    stored = packed(f"{kind}-fp8", 2, 80, 192)
    fp8 = kind_named(f"{kind}-fp8")
    given = (stored.scale if kind == "mxfp4" else None, torch.float8_e4m3fn, stored.extra)
    got = four_bit.unpacked(stored.data, FORMATS[kind], *given)
    assert torch.equal(got.float(), fp8.image(stored).float())
    turned = four_bit.unpacked(stored.data, FORMATS[kind], *given, turned=True)
    assert torch.equal(turned.float(), fp8.turned_image(stored).float())


def test_a_rank_without_columns_or_rows_unpacks_nothing() -> None:
    from erniekit.kernels.triton import four_bit

    assert four_bit.unpacked(torch.empty(3, 0, dtype=torch.uint8), "int4", None, torch.bfloat16).shape == (3, 0)
    nothing = torch.empty(2, 0, 32, dtype=torch.uint8)
    assert four_bit.unpacked(nothing, "int4", None, torch.bfloat16, turned=True).shape == (2, 64, 0)


COMPILE = """
from erniekit.kernels.triton import four_bit

#         format, scales,  group, powers, over most, out
CASES = [("int4", None,    0,     False,  False,     "*fp8e4nv"),
         ("int4", "*bf16", 64,    False,  False,     "*bf16"),
         ("e2m1", "*u8",   32,    True,   True,      "*fp8e4nv"),
         ("nf4",  "*fp32", 64,    False,  False,     "*bf16")]
for format, scales, group, powers, over, out in CASES:
    for turned in (False, True):
        kinds = dict(codes="*u8", scales=scales or "*u8", most="*u8", out=out, rows="i32", width="i32")
        kinds["table"] = "*fp32" if format == "nf4" else "*u8"
        tile = four_bit.UNPACK_TURNED if turned else four_bit.UNPACK
        fixed = dict(GROUP=group, FORMAT=format, SCALED=scales is not None, POWERS=powers, OVER_MOST=over, TOP=6,
                     TURNED=turned, BR=tile.rows, BC=tile.cols)
        ptx = built(four_bit._unpack, kinds, fixed, tile.warps)["ptx"]
        assert "st.global.v4" in ptx and "st.global.b8" not in ptx, "whole lines are written"
"""


@pytest.mark.full
def test_it_compiles_for_a_hopper_card_and_writes_whole_lines(tmp_path: Path) -> None:
    run_for_hopper(COMPILE, tmp_path)
