"""A backward pass in two halves gives the gradients of one, each half those it is for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from erniekit.parallel.split_backward import backward_of_input


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += op.name() in ("aten::mm", "aten::addmm")
        return op(*args, **(kwargs or {}))


class Scaled(torch.autograd.Function):
    """A function of Python, as fused kernels are; it may not run twice."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        Scaled.runs += 1
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 4)
        self.tied = nn.Parameter(torch.randn(4, 4))
        self.scale = nn.Parameter(torch.randn(4))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.tied + self.frozen
        x = x + self.two(torch.relu(self.one(x)))
        return Scaled.apply(x, self.scale) @ self.tied.t()


def test_both_halves_together_are_one_backward_pass() -> None:
    torch.manual_seed(0)
    net, start = Net().double(), torch.randn(3, 4, dtype=torch.float64)
    x, grad = start.clone().requires_grad_(), torch.randn(3, 4, dtype=torch.float64)
    with Products() as whole:
        out = net(x)
        forward = whole.count
        out.backward(grad)
    want = {name: p.grad for name, p in net.named_parameters() if p.requires_grad}
    net.zero_grad()
    heard: list[str] = []
    for name, p in net.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda _, n=name: heard.append(n))
    y, Scaled.runs = start.clone().requires_grad_(), 0
    out = net(y)
    with Products() as halves:
        passed, left = backward_of_input(out, grad, y, net.parameters())
        first = halves.count
        assert net.one.weight.grad is None
        assert net.tied.grad is not None, "two nodes read it: it cannot wait"
        left.run()
    torch.testing.assert_close(passed, x.grad)
    for name, p in net.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad, want[name], msg=name)
    assert sorted(heard) == sorted(want)
    assert Scaled.runs == 1
    assert halves.count == whole.count - forward, "no product is computed twice"
    assert halves.count - first == 2, "the weights of two linears waited"


def test_gradients_of_several_micro_batches_add_up() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    rows = [torch.randn(2, 4) for _ in range(3)]
    torch.cat([net(x) for x in rows]).sum().backward()
    want = [p.grad for p in net.parameters()]
    net.zero_grad()
    waiting = [backward_of_input(net(x).sum(), None, x.requires_grad_(), net.parameters())[1] for x in rows]
    for left in waiting:
        left.run()
    for p, grad in zip(net.parameters(), want):
        torch.testing.assert_close(p.grad, grad)
