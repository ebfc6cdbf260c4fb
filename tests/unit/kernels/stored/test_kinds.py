"""What every packed kind promises: cuts, shapes, errors, products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from erniekit.kernels import stored as stored_kinds
from erniekit.kernels.stored import Agree, Stored, WeightKind, bits_of, kind_named, kind_of, multiplied_in_fp8
from erniekit.kernels.stored.fp8 import Fp8
from erniekit.weight_kinds import BASES, BF16, IN_FP8, MIXES, WEIGHT_KINDS

KINDS = [kind for kind in WEIGHT_KINDS if kind != "plain"]
SIXTEEN = [kind for kind in KINDS if not kind_named(kind).rows_in_fp8]
# The norm of the error over the weight's, in %: Gaussian numbers, Student's t with 5 degrees, columns of outliers.
ERRORS = {
    "fp8": (2.64, 2.62, 2.44), "int8": (0.83, 1.73, 4.02), "int4": (15.1, 31.0, 37.9), "int4-group": (9.5, 13.0, 20.1),
    "mxfp4": (11.2, 12.4, 16.1), "nf4": (9.2, 10.5, 15.8),
}  # fmt: skip


def gaussian(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)) * 0.02


def width_of(kind: str, least: int = 4096) -> int:
    """Columns that it takes, also cut into halves."""
    fits = kind_named(kind).fits
    return next(w for w in range(least, 2 * least, 2) if fits(96, w) and fits(96, w // 2))


def tensors(weight: Stored) -> list[torch.Tensor]:
    return [t for t in weight[:3] if t is not None]


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def outliers(rows: int, width: int) -> torch.Tensor:
    w = gaussian(rows, width)
    w[:, torch.randperm(width, generator=torch.Generator().manual_seed(2))[: width // 64]] *= 20
    return w


@pytest.mark.parametrize("kind", ERRORS)
def test_a_weight_comes_back_as_near_as_its_bits_allow(kind: str) -> None:
    torch.manual_seed(0)
    drawn = (gaussian(256, 2048), torch.distributions.StudentT(5.0).sample((256, 2048)), outliers(256, 2048))
    found = []
    for w in (weight.bfloat16() for weight in drawn):
        back = kind_named(kind).unpack(kind_named(kind).pack(w), torch.float32)
        found.append(100 * float((back - w.float()).norm() / w.float().norm()))
    assert found == pytest.approx(ERRORS[kind], rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_packed_independently_and_columns_by_agreement(kind: str) -> None:
    w = outliers(64, width_of(kind, 256)).bfloat16()
    whole = kind_named(kind).pack(w)
    for piece, rows in (
        (kind_named(kind).pack(part), slice(i * 16, i * 16 + 16)) for i, part in enumerate(w.split(16))
    ):
        for mine, all_ in zip(tensors(piece), tensors(whole), strict=True):
            assert torch.equal(bits(mine), bits(all_[rows]))

    def agreeing(halves: list[torch.Tensor]) -> list[Stored]:
        """As two ranks that each know their half; the maximum is asked for once at most."""
        asked: list[torch.Tensor] = []

        def note(values: torch.Tensor) -> torch.Tensor:
            asked.append(values.clone())
            return values

        for half in halves:
            kind_named(kind).pack(half, note)
        if not asked:
            return [kind_named(kind).pack(half, note) for half in halves]
        most = torch.maximum(*asked)
        return [kind_named(kind).pack(half, lambda values: most) for half in halves]

    for half, columns in zip(agreeing(list(w.chunk(2, dim=1))), (0, 1), strict=True):
        for mine, all_ in zip(tensors(half), tensors(whole), strict=True):
            width = all_.shape[1] // 2
            expected = all_ if mine.shape == all_.shape else all_[:, columns * width : (columns + 1) * width]
            assert torch.equal(bits(mine), bits(expected)), "the bytes that the whole would have"


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_are_known_and_experts_are_rows_in_groups(kind: str) -> None:
    width = width_of(kind, 256)
    flat = kind_named(kind).pack(gaussian(96, width).bfloat16())
    assert kind_named(kind).shape(flat) == (96, width)
    experts = flat.of_experts(3)
    assert kind_named(kind).shape(experts) == (32, width)
    unpacked = kind_named(kind).unpack(experts, torch.bfloat16)
    assert torch.equal(unpacked.flatten(0, 1), kind_named(kind).unpack(flat, torch.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind: str) -> None:
    w = gaussian(96, width_of(kind, 256)).bfloat16()
    w[3] = 0
    back = kind_named(kind).unpack(kind_named(kind).pack(w), torch.float32)
    assert (back[3] == 0).all()
    assert torch.isfinite(back).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_columns_packs_nothing(kind: str) -> None:
    stored = kind_named(kind).pack(torch.empty(16, 0, dtype=torch.bfloat16), lambda most: torch.full_like(most, 3.0))
    assert kind_named(kind).shape(stored) == (16, 0)


@pytest.mark.parametrize("kind", SIXTEEN)
def test_products_are_those_of_the_unpacked_weight(kind: str) -> None:
    width = width_of(kind, 256)
    stored = kind_named(kind).pack(gaussian(96, width))
    w = kind_named(kind).unpack(stored, torch.float32)
    x, grad = torch.randn(5, width), torch.randn(5, 96)
    torch.testing.assert_close(kind_of(stored).product(x, stored), x @ w.t())
    torch.testing.assert_close(kind_of(stored).turned_product(grad, stored), grad @ w)
    experts, ends = stored.of_experts(3), torch.tensor([2, 2, 5], dtype=torch.int32)
    each = w.unflatten(0, (3, -1))
    want = torch.cat([x[:2] @ each[0].t(), x[2:] @ each[2].t()])
    torch.testing.assert_close(kind_of(stored).grouped(x, experts, ends, torch.float32), want)


@pytest.mark.parametrize("kind", ["int4-group", "mxfp4", "nf4"])
def test_a_cut_through_a_group_is_refused(kind: str) -> None:
    group = {"int4-group": 64, "mxfp4": 32, "nf4": 64}[kind]
    assert kind_named(kind).fits(48, 3 * group)
    assert not kind_named(kind).fits(48, 3 * group + group // 2)


def test_an_odd_width_has_no_two_columns_a_byte() -> None:
    assert not kind_named("int4").fits(16, 17)
    assert kind_named("int8").fits(16, 17)


class Thirds(WeightKind):
    """Of another package: groups of 96 columns, which divide no power of two; a byte a number, a scale a group."""

    name = "thirds"

    def fits(self, out: int, width: int) -> bool:
        return width % 96 == 0

    def pack(self, weight: torch.Tensor, agree: Agree | None = None) -> Stored:
        groups = weight.float().unflatten(-1, (-1, 96))
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return Stored((groups / scale).round().to(torch.int8).flatten(-2), scale.squeeze(-1), kind=self.name)

    def unpack(self, weight: Stored, dtype: torch.dtype) -> torch.Tensor:
        assert weight.scale is not None
        groups = weight.data.float().unflatten(-1, (-1, 96))
        return (groups * weight.scale.unsqueeze(-1)).flatten(-2).to(dtype)


class Whole(Thirds):
    name = "whole"

    def fits(self, out: int, width: int) -> bool:
        return False


def test_a_kind_whose_group_divides_no_power_of_two_has_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stored_kinds._LOADED, "thirds", Thirds())
    assert bits_of("thirds") == 8 + 32 / 96


def test_weights_that_a_kind_does_not_fit_stay_in_16_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stored_kinds._LOADED, "whole", Whole())
    assert bits_of("whole") == 16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draw", [gaussian, outliers])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packing_what_was_unpacked_gives_the_same_numbers(kind: str, draw: Callable, dtype: torch.dtype) -> None:
    """What `merge_grid` promises of the files it writes."""
    w = draw(64, width_of(kind)).to(dtype)
    once = kind_named(kind).unpack(kind_named(kind).pack(w), dtype)
    assert torch.equal(kind_named(kind).unpack(kind_named(kind).pack(once), dtype), once)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_that_memory_is_counted_with_are_those_that_are_held(kind: str) -> None:
    rows, width = 64, width_of(kind)
    held = sum(t.numel() * t.element_size() for t in tensors(kind_named(kind).pack(gaussian(rows, width).bfloat16())))
    of_rows = 32 * 2 / width  # at most two scales of 32 bits a row, which are not counted
    assert 8 * held / (rows * width) == pytest.approx(bits_of(kind), abs=of_rows)


def test_a_user_chooses_among_kinds_and_mixes_and_not_among_ways_to_multiply() -> None:
    assert BASES[0] == BF16
    assert set(BASES) == {BF16, *WEIGHT_KINDS, *MIXES} - {"plain", "int4-fp8", "mxfp4-fp8"}
    assert all(kind_named(kind).exact_in_fp8 for kind in IN_FP8)
    assert all(kind_named(kind).rows_in_fp8 for kind in IN_FP8.values())


@pytest.mark.parametrize(
    ("base", "products", "role", "in_fp8"),
    [
        ("bf16", "fp8", "experts", False),
        ("fp8", "fp8", "attention", True),
        ("int4", "bf16", "experts", False),
        ("int4", "fp8", "experts", True),
        ("nf4", "fp8", "experts", False),
        ("wint4/8", "fp8", "experts", True),
        ("wint4/8", "fp8", "attention", False),
        ("wint4/8", "fp8", "router", False),
    ],
)
def test_a_kind_says_whether_it_is_multiplied_in_fp8(base: str, products: str, role: str, in_fp8: bool) -> None:
    assert multiplied_in_fp8(base, products, role) is in_fp8


def test_so_does_one_that_a_package_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Fp8):
        name = "other"

    monkeypatch.setitem(stored_kinds._LOADED, "other", Other())
    assert multiplied_in_fp8("other", "bf16", "experts")


@pytest.mark.parametrize("kind", ["int4", "mxfp4"])
@pytest.mark.parametrize("draw", [gaussian, outliers])
def test_the_image_in_fp8_times_its_scale_is_the_unpacked_weight_bit_for_bit(kind: str, draw: Callable) -> None:
    w = draw(96, 256).bfloat16()
    plain, small = (kind_named(name).pack(w) for name in (kind, IN_FP8[kind]))
    assert small.kind == IN_FP8[kind]
    assert torch.equal(plain.data, small.data)
    assert plain.scale is not None
    assert small.scale is not None
    assert torch.equal(plain.scale, small.scale)
    fp8, of = kind_named(small.kind), small.of_experts(3)
    exact = kind_named(kind).unpack(plain, torch.float32).unflatten(0, (3, -1))
    assert torch.equal(fp8.image(of).float() * fp8.row_scale(of), exact)
    assert torch.equal(fp8.turned_image(of).float() * fp8.row_scale(of).transpose(1, 2), exact.transpose(1, 2))
    # Both directions then differ from 16-bit products by the rounding of their rows alone.
    x, grad = torch.randn(7, 256), torch.randn(7, 96)
    assert float((fp8.product(x, small) - x @ exact.flatten(0, 1).t()).norm() / x.norm() / exact.norm()) < 0.01
    turned, want = fp8.turned_product(grad, small), grad @ exact.flatten(0, 1)
    assert float((turned - want).norm() / want.norm()) < 0.04


def test_mxfp4_whose_rows_are_too_wide_for_fp8_is_multiplied_in_16_bit() -> None:
    w = gaussian(32, 64)
    w[5, :32] *= 2.0**-12
    assert kind_named("mxfp4-fp8").pack(w.bfloat16()).kind == "mxfp4-fp8"
    w[5, :32] *= 2.0**-6
    stored = kind_named("mxfp4-fp8").pack(w.bfloat16())
    assert stored.kind == "mxfp4"
    plain = kind_named("mxfp4").pack(w.bfloat16())
    assert torch.equal(kind_of(stored).unpack(stored, torch.float32), kind_of(plain).unpack(plain, torch.float32))
