"""Integers with a scale a row, against what paddlepaddle 3.2.2's own quantiser stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from erniekit.kernels import integers
from erniekit.kernels.nibbles import unpack_signed
from erniekit.kernels.stored import kind_named

CASES = ("gaussian", "student5", "outliers", "tiny", "zero_column")


@pytest.fixture(scope="module")
def recorded(paddle: Path) -> dict[str, torch.Tensor]:
    return load_file(paddle / "quant.safetensors")


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("case", CASES)
def test_scales_are_paddles_bit_for_bit_and_values_as_a_multiset(
    case: str, kind: str, recorded: dict[str, torch.Tensor]
) -> None:
    weight = recorded[f"{case}.weight"].t().contiguous().bfloat16()
    stored = kind_named(kind).pack(weight)
    assert stored.scale is not None
    assert stored.scale.dtype == torch.bfloat16
    assert torch.equal(stored.scale.squeeze(-1).float(), recorded[f"{case}.weight_only_{kind}.scale"])
    values = stored.data if kind == "int8" else unpack_signed(stored.data)
    theirs = recorded[f"{case}.weight_only_{kind}.sorted_values"]
    if case == "zero_column":  # theirs divides by zero there; what it stores is no number of that column
        rest = (weight != 0).any(-1)
        assert (values[~rest] == 0).all()
        ours = values[rest].flatten().sort().values
        counts = torch.bincount(theirs.int() + 128, minlength=256) - torch.bincount(ours.int() + 128, minlength=256)
        assert (counts >= 0).all()
        assert int(counts.sum()) == weight.shape[1]
    else:
        assert torch.equal(values.flatten().sort().values, theirs)


@pytest.mark.parametrize("case", CASES)
def test_values_are_paddles_one_by_one_where_it_stores_them_in_order(
    case: str, recorded: dict[str, torch.Tensor]
) -> None:
    weight, scale = recorded[f"{case}.weight"].t().contiguous(), recorded[f"{case}.llm.int8.scale"]
    rest = (weight != 0).any(-1)
    by = (integers.largest(weight) / 127)[rest]  # llm.int8 keeps it in fp32
    assert torch.equal(by.squeeze(-1), scale[rest])
    assert torch.equal(integers.rounded(weight[rest], by, -127, 127), recorded[f"{case}.llm.int8.values"][rest].float())


def test_halves_go_away_from_zero_and_what_is_just_below_does_not() -> None:
    below = torch.nextafter(torch.tensor(0.5), torch.tensor(0.0))
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -2.5, below.item(), -below.item(), 9.0, -9.0])
    one = torch.ones(1)
    assert integers.rounded(values, one, -7, 7).tolist() == [1, 2, 3, -1, -3, 0, 0, 7, -7]
