"""Products of quack-kernels: where there is none, torch answers; where it fails or errs, it is told of and not used."""

from __future__ import annotations

import pytest
import torch

from erniekit.kernels import quack_gemm as products

CPU = torch.device("cpu")


def test_without_a_hopper_card_it_computes_nothing() -> None:
    assert [products.why_not(what, CPU) for what in products.TRIALS] == ["for Hopper cards"] * 3


def test_a_head_is_taken_from_many_rows_and_columns_on_in_bf16() -> None:
    x, weight = torch.empty(2000, 8, dtype=torch.bfloat16), torch.empty(20000, 8, dtype=torch.bfloat16)
    assert products.takes_logits(x, weight)
    assert not products.takes_logits(x[:1000], weight)
    assert not products.takes_logits(x, weight[:16000])
    assert not products.takes_logits(x.float(), weight.float())
    assert not products.takes_logits(x, weight.t().contiguous().t())


@pytest.mark.parametrize(("off", "agrees"), [(0.0, True), (0.005, True), (0.3, False), (float("nan"), False)])
def test_what_errs_is_told_of_and_not_used(capsys: pytest.CaptureFixture[str], off: float, agrees: bool) -> None:
    one = torch.ones(4)
    assert products.agrees(f"off by {off}", lambda: ([one, one + off], [one, one])) is agrees
    assert ("not used" in "".join(capsys.readouterr())) is not agrees


def test_what_fails_is_told_of_and_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    def trial() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        raise RuntimeError("no such instruction")

    assert not products.agrees("a trial that fails", trial)
    assert "no such instruction" in "".join(capsys.readouterr())
