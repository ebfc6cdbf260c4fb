"""Products of quack-kernels: where there is none, torch answers; where it fails or errs, it is told of and not used."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from erniekit.kernels import quack_gemm as products

CPU = torch.device("cpu")


def test_without_a_hopper_card_torch_answers() -> None:
    assert not any(does(CPU) for does in (products.groups, products.widens, products.gates))
    torch.manual_seed(0)
    x, weight = torch.randn(2000, 8), torch.randn(20000, 8)
    torch.testing.assert_close(products.logits(x, weight), F.linear(x, weight), atol=0, rtol=0)


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
