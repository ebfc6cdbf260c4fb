"""Products of quack-kernels: where there is none, torch answers; where it fails or errs, it is told of and not used."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from erniekit.kernels import broken
from erniekit.kernels import quack_gemm as products
from erniekit.kernels.available import loaded

CPU = torch.device("cpu")


def cutlass_in(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("cutlass")
    module.__file__ = f"/opt/{folder}/cutlass/__init__.py"
    monkeypatch.setitem(sys.modules, "cutlass", module)


def test_without_a_hopper_card_it_computes_nothing() -> None:
    assert [products.why_not(what, CPU) for what in products.TRIALS] == ["for Hopper cards"] * 3


def test_a_head_is_taken_from_many_rows_on_in_bf16() -> None:
    x, weight = torch.empty(2000, 8, dtype=torch.bfloat16), torch.empty(20000, 8, dtype=torch.bfloat16)
    assert products.takes_logits(x, weight)
    assert not products.takes_logits(x[:1000], weight)
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


@pytest.mark.parametrize(("folder", "blamed"), [("site", True), ("site-packages", False), ("dist-packages", False)])
def test_an_epilogue_without_a_key_is_put_down_to_the_folder_that_cutlass_lies_in(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: str, blamed: bool
) -> None:
    cutlass_in(folder, monkeypatch)

    def trial() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        raise TypeError(f"a logger of {folder} has no semantic key")

    assert not products.agrees("a product with an epilogue", trial)
    said = capsys.readouterr().err
    assert ("not in a folder named site-packages" in said) is blamed
    assert (f"a logger of {folder}" in said) is not blamed


def test_another_problem_is_told_of_as_it_is_wherever_cutlass_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    cutlass_in("site", monkeypatch)
    problem = TypeError("gemm_act() got a keyword it does not know")
    assert products.cause(problem) is problem


def test_a_broken_library_costs_one_line_on_the_screen_and_is_told_whole_in_the_record(
    capsys: pytest.CaptureFixture[str],
) -> None:
    problem = TypeError(
        "gemm() got a keyword it does not know\n" + "\n".join(f"note {k} of a compiler" for k in range(6))
    )
    for _ in range(2):
        broken.report("some-kernels", problem)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert len(said) < 240
    assert "gemm() got a keyword" in said
    assert "erniekit-torch[flash4]" in said
    (story,) = [each for each in broken.tracebacks() if each.startswith("some-kernels")]
    assert "note 5 of a compiler" in story


def test_a_package_that_is_there_without_what_is_needed_of_it_is_told_of_and_a_missing_one_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert loaded("sentencepiece", "no_such_kernel", package="sentencepiece") is None
    assert "no_such_kernel" in capsys.readouterr().err
    assert loaded("no_such_module", package="no-such-package") is None
    assert capsys.readouterr().err == ""
