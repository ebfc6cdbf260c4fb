"""Rounding with carried errors against real outputs, and where it has nothing to carry."""

from __future__ import annotations

import pytest
import torch

from erniekit.kernels.compressed import rounded, scales_of
from erniekit.quant_schemes import QUANT_RECIPES
from erniekit.quantize import gptq
from erniekit.quantize.gptq import compensated, round_weight

SCHEMES = {name: QUANT_RECIPES[name].rest for name in ("w4a16", "w8a16", "w8a8", "fp8_static", "fp8_dynamic", "mxfp4")}


def problem(tokens: int = 400, columns: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, and inputs whose columns depend on each other and differ in size."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    x = torch.randn(tokens, columns, generator=generator) @ mixing * torch.rand(columns, generator=generator) * 3
    return torch.randn(48, columns, generator=generator) * 0.05, x


def output_error(weight: torch.Tensor, other: torch.Tensor, x: torch.Tensor) -> float:
    return float((x @ (weight - other).T).square().sum() / (x @ weight.T).square().sum())


@pytest.mark.parametrize("name", SCHEMES)
def test_real_outputs_are_nearer_than_those_of_rounding_to_nearest_and_the_errors_told_are_real(name: str) -> None:
    (w, x), scheme = problem(), SCHEMES[name]
    scale = scales_of(w, scheme)
    done = round_weight(w, scale, scheme, x.T @ x, compensate=True)
    nearest = rounded(w, scale, scheme)
    assert output_error(w, done.weight, x) < 0.8 * output_error(w, nearest, x)
    assert done.error == pytest.approx(output_error(w, done.weight, x), rel=1e-2)
    assert done.nearest_error == pytest.approx(output_error(w, nearest, x), rel=1e-2)
    assert torch.equal(rounded(done.weight, scale, scheme), done.weight), "every value is one the scales can store"


def test_columns_carried_one_by_one_or_in_blocks_give_the_same_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    (w, x), scheme = problem(columns=128), SCHEMES["w4a16"]
    scale = scales_of(w, scheme)
    whole = compensated(w, scale, scheme, x.T @ x)
    monkeypatch.setattr(gptq, "BLOCK", 1)
    # A tie may fall to the other side where sums are added in another order.
    assert (compensated(w, scale, scheme, x.T @ x) != whole).float().mean() < 0.01


def test_independent_inputs_leave_nothing_to_carry() -> None:
    w, scheme = problem()[0], SCHEMES["w4a16"]
    scale = scales_of(w, scheme)
    assert torch.equal(compensated(w, scale, scheme, torch.eye(256) * 7), rounded(w, scale, scheme))


def test_inputs_that_are_always_zero_and_fewer_tokens_than_columns_are_no_obstacle() -> None:
    (w, x), scheme = problem(tokens=20), SCHEMES["w4a16"]
    x[:, 5:60] = 0
    scale = scales_of(w, scheme)
    done = round_weight(w, scale, scheme, x.T @ x, compensate=True)
    assert output_error(w, done.weight, x) < 0.1 * output_error(w, rounded(w, scale, scheme), x)
    assert torch.equal(done.weight[:, 5:60], rounded(w, scale, scheme)[:, 5:60])


def test_without_inputs_weights_are_rounded_to_nearest_and_no_error_is_told() -> None:
    w, scheme = problem()[0], SCHEMES["w4a16"]
    scale = scales_of(w, scheme)
    done = round_weight(w, scale, scheme, None, compensate=True)
    assert torch.equal(done.weight, rounded(w, scale, scheme))
    assert done.error is None
    silent = round_weight(w, scale, scheme, torch.zeros(256, 256), compensate=True)
    assert torch.equal(silent.weight, done.weight)
    assert silent.error == 0.0
