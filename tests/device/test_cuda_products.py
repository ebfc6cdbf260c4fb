"""Products of quack-kernels on a Hopper card against fp32, at real and odd sizes, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from erniekit.kernels import quack_gemm as products
from erniekit.kernels.gate_up import gate_up_swiglu, reference
from erniekit.kernels.selection import GateUpFacts, chosen

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card"),
    pytest.mark.skipif(products.library() is None, reason="needs quack-kernels: pip install 'erniekit-torch[flash4]'"),
]
DEVICE = torch.device("cuda", 0)


def drawn(*shape: int, std: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * std).bfloat16()


def apart(got: torch.Tensor, true: torch.Tensor) -> float:
    return float((got.float() - true).norm() / true.norm())


@pytest.mark.parametrize(
    ("tokens", "hidden", "width"), [(1, 1024, 3072), (777, 1024, 3072), (33, 64, 192), (4096, 2048, 5632)]
)
@pytest.mark.parametrize("trained", [True, False])
def test_gate_up_and_swiglu_in_one_op(tokens: int, hidden: int, width: int, trained: bool) -> None:
    torch.manual_seed(tokens)
    x, weight = drawn(tokens, hidden), drawn(2 * width, hidden, std=hidden**-0.5)
    assert chosen("feed-forward", GateUpFacts(DEVICE, hidden, 2 * width, True)) == "quack"
    ours = x.clone().requires_grad_(), weight.clone().requires_grad_(trained)
    exact = x.float().requires_grad_(), weight.float().requires_grad_(trained)
    grad = drawn(tokens, width)
    got, want = gate_up_swiglu(*ours), reference(*exact)
    got.backward(grad)
    want.backward(grad.float())
    assert apart(got, want) < 0.01, "inputs, activations and results are rounded to 0.2 % each"
    assert apart(ours[0].grad, exact[0].grad) < 0.01
    if trained:
        assert apart(ours[1].grad, exact[1].grad) < 0.01
    else:
        assert ours[1].grad is None


@pytest.mark.parametrize(("rows", "hidden", "vocab"), [(4096, 1024, 103424), (1025, 2560, 32000)])
def test_logits_of_a_wide_head(rows: int, hidden: int, vocab: int) -> None:
    assert products.why_not("head", DEVICE) is None
    torch.manual_seed(0)
    x, weight = drawn(rows, hidden), drawn(vocab, hidden, std=0.02)
    assert apart(products.logits(x, weight), F.linear(x.float(), weight.float())) < 0.005


def test_grouped_products_are_right_here() -> None:
    """Real sizes, skewed and empty experts are in test_cuda_experts.py, which uses them."""
    assert products.why_not("experts", DEVICE) is None
