"""Sum and norm in one sweep: the Triton kernel as the definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from erniekit.kernels.add_norm import add_norm, reference
from erniekit.kernels.rms_norm import rms_norm
from erniekit.models.layers.norm import RMSNorm
from support.for_hopper import run_for_hopper

pytest.importorskip("triton", reason="the dev extra installs it on Linux")

from erniekit.kernels.triton import add_norm as kernels


@pytest.mark.parametrize("width", [48, 64])
@pytest.mark.parametrize("adds", [False, True])
def test_the_kernel_sums_and_normalises_as_the_definition(width: int, adds: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, width) * 4, torch.randn(width)
    added = torch.randn(5, width) if adds else None
    for mine, theirs in zip(kernels.add_norm(x, added, weight, 1e-5), reference(x, added, weight, 1e-5)):
        torch.testing.assert_close(mine, theirs)


def test_what_is_normalised_is_the_sum_as_it_is_kept() -> None:
    torch.manual_seed(1)
    x, added, weight = (torch.randn(3, 32).bfloat16() for _ in range(3))
    total, normed = add_norm(x, added, weight[0], 1e-5)
    assert torch.equal(total, x + added)
    assert torch.equal(normed, rms_norm(total, weight[0], 1e-5))


@pytest.mark.parametrize("rows", [3, 11])  # fewer and more than there are programs
@pytest.mark.parametrize("of_sum", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_the_gradients_are_those_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, rows: int, of_sum: bool, trained: bool
) -> None:
    monkeypatch.setattr(kernels, "WARPS", 4)  # and as many programs, of one
    torch.manual_seed(2)
    x, added, weight = torch.randn(rows, 48) * 4, torch.randn(rows, 48), torch.randn(48)
    given = [tensor.double().requires_grad_() for tensor in (x, added, weight)]
    total, normed = reference(*given, 1e-5)
    of_total, of_normed = torch.randn(rows, 48), torch.randn(rows, 48)
    ((total * of_total).sum() * of_sum + (normed * of_normed).sum()).backward()
    kept = reference(x, added, weight, 1e-5)[0]
    of_x, of_weight = kernels.gradients(of_total if of_sum else None, of_normed, kept, weight, 1e-5, trained)
    torch.testing.assert_close(of_x, given[0].grad.float(), atol=2e-6, rtol=2e-5)
    assert (of_weight is not None) == trained
    if of_weight is not None:
        torch.testing.assert_close(of_weight, given[2].grad.float(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("adds", [False, True])
def test_autograd_takes_the_kernels_gradients_to_all_three(monkeypatch: pytest.MonkeyPatch, adds: bool) -> None:
    """On a card; here its kernels run in Triton's interpreter."""
    monkeypatch.setattr("erniekit.kernels.add_norm.runs_triton", lambda tensor: True)
    torch.manual_seed(3)
    drawn = [(torch.randn(2, 3, 64) * 2).bfloat16(), torch.randn(2, 3, 64).bfloat16(), torch.randn(64).bfloat16()]
    of_total, of_normed = torch.randn(2, 3, 64).bfloat16(), torch.randn(2, 3, 64).bfloat16()
    found = []
    for function in (add_norm, reference):
        x, added, weight = (tensor.clone().requires_grad_() for tensor in drawn)
        total, normed = function(x * 1, added * 1 if adds else None, weight, 1e-5)
        assert (total.grad_fn is not None and "AddNorm" in type(total.grad_fn).__name__) == (function is add_norm)
        torch.autograd.backward([total, normed], [of_total, of_normed])
        found.append([total, normed, x.grad, weight.grad, *([added.grad] if adds else [])])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=0.06, rtol=0.02)  # the definition rounds between steps


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_a_compiled_layer_may_have_the_kernel_itself(
    monkeypatch: pytest.MonkeyPatch, adds: bool, trained: bool
) -> None:
    """With its gradients, and with the bits that it gives without."""
    monkeypatch.setattr("erniekit.kernels.add_norm.runs_triton", lambda tensor: True)
    torch.manual_seed(6)
    drawn = [torch.randn(2, 3, 64).bfloat16() for _ in range(2)]
    weight = torch.randn(64).bfloat16().requires_grad_(trained)
    of_total, of_normed = torch.randn(2, 3, 64).bfloat16(), torch.randn(2, 3, 64).bfloat16()

    def function(x: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return add_norm(x * 1, added * 1 if adds else None, weight, 1e-5, as_op=True)

    compiled, found = torch.compile(function, fullgraph=True, backend="aot_eager"), []
    for each in (function, compiled):
        weight.grad = None
        x, added = (tensor.clone().requires_grad_() for tensor in drawn)
        both = each(x, added)
        with torch.no_grad():
            assert all(map(torch.equal, each(x, added), both))
        torch.autograd.backward(both, [of_total, of_normed])
        found.append([*both, x.grad, *([added.grad] if adds else []), *([weight.grad] if trained else [])])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=0.02, rtol=0.01)  # without a sum two gradients are added apart
    assert all(map(torch.equal, found[0][:2], found[1][:2]))
    inputs = [drawn[0], *([drawn[1]] if adds else []), weight, 1e-5]
    torch.library.opcheck(getattr(torch.ops.erniekit, "add_norm" if adds else "norm"), tuple(inputs))


def test_a_weight_in_fp32_beside_16_bit_rows_is_multiplied_as_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("erniekit.kernels.add_norm.runs_triton", lambda tensor: True)
    x, weight = torch.randn(2, 32).bfloat16().requires_grad_(), torch.randn(32)
    assert torch.equal(add_norm(x, None, weight, 1e-5)[1], rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("grads", [False, True])
def test_rows_that_are_a_part_of_longer_ones_are_those_rows(monkeypatch: pytest.MonkeyPatch, grads: bool) -> None:
    """A slice of each sequence: its rows do not lie end to end."""
    monkeypatch.setattr("erniekit.kernels.add_norm.runs_triton", lambda tensor: True)
    torch.manual_seed(4)
    whole, more = (torch.randn(2, 6, 32).bfloat16().requires_grad_(grads) for _ in range(2))
    x, added, weight = whole.chunk(2, dim=1)[1], more.chunk(2, dim=1)[1], torch.randn(32).bfloat16()
    assert not x.is_contiguous()
    for mine, theirs in zip(add_norm(x, added, weight, 1e-5), reference(x, added, weight, 1e-5)):
        torch.testing.assert_close(mine, theirs, atol=0.06, rtol=0.02)  # the interpreter cuts where a card rounds


@pytest.mark.parametrize(("rows", "weights"), [("float32", "float32"), ("float64", "float64"), ("bfloat16", "float32")])
def test_a_norm_in_wider_formats_has_the_same_bits_with_and_without_gradients(
    monkeypatch: pytest.MonkeyPatch, rows: str, weights: str
) -> None:
    monkeypatch.setattr("erniekit.kernels.add_norm.runs_triton", lambda tensor: True)
    torch.manual_seed(5)
    norm = RMSNorm(48, 1e-5).to(getattr(torch, weights))
    x = torch.randn(3, 48, dtype=torch.float64).to(getattr(torch, rows)) * 3
    trained = norm(x)
    with torch.no_grad():
        evaluated = norm(x)
    assert trained.requires_grad
    assert torch.equal(trained, evaluated)
    assert torch.equal(evaluated, rms_norm(x, norm.weight, 1e-5))


COMPILE = """
from erniekit.kernels.triton import add_norm

block, warps = add_norm._block(2560)
kinds = dict(rows="i32", width="i32", eps="fp32", of_weight="*fp32")
back = add_norm._rows_back
for kernel, fixed in ((add_norm._rows, {}), (back, {"WEIGHT": True}), (back, {"WEIGHT": False})):
    given = {name: kinds.get(name, "*bf16") for name in kernel.arg_names}
    print(built(kernel, given, {"ADDS": True, "BLOCK": block, **fixed}, warps)["ptx"].count("ld.global.v4"))
"""


def test_the_kernels_compile_for_a_hopper_card_and_read_whole_lines(tmp_path: Path) -> None:
    assert all(int(count) >= 4 for count in run_for_hopper(COMPILE, tmp_path).split())
