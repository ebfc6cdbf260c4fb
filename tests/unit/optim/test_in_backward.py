"""Updates inside the backward pass: the same update as after it, gradients let go at once, bad ones skipped."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.in_backward import BackwardUpdates, seen_gradients
from support.optimizer_steps import steps_taken
from support.plain_adamw import PlainAdamW

WIDTH = 6


def tiny(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).to(dtype)


def optimizer_of(model: nn.Module, late: bool = False) -> AdamW:
    out = AdamW(make_groups(model.named_parameters(), 3, 0.1), (0.9, 0.95), 1e-8)
    if late:
        out.fused = PlainAdamW()  # type: ignore[assignment]
    return out


def loss_of(model: nn.Module, k: int) -> torch.Tensor:
    first = next(model.parameters())
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(k)).to(first.dtype)
    return model(x).float().pow(2).sum()


def step(model: nn.Module, updates: BackwardUpdates, k: int, lr: float = 1e-2) -> float:
    loss = loss_of(model, k)
    updates.begin(lr)
    updates.saw_loss(loss)
    loss.backward()
    return float(updates.end())


def masters(optimizer: AdamW) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in optimizer.masters.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_clipping_the_updates_are_those_after_backward(dtype: torch.dtype, late: bool) -> None:
    here, there = tiny(dtype), tiny(dtype)
    inside, after = optimizer_of(here, late), optimizer_of(there, late)
    updates = BackwardUpdates(inside, 0.0)
    for k in range(4):
        norm = step(here, updates, k)
        loss_of(there, k).backward()
        assert norm == pytest.approx(float(after.gradient_norm()), rel=1e-6)
        after.step(1e-2)
        after.zero_grad()
    assert same(masters(inside), masters(after))
    assert same(dict(inside.state_tensors()), dict(after.state_tensors()))


def test_gradients_are_clipped_by_the_norm_of_the_step_before_and_at_first_by_their_own() -> None:
    here, there = tiny(torch.float32), tiny(torch.float32)
    inside, after = optimizer_of(here), optimizer_of(there)
    updates = BackwardUpdates(inside, 0.5)
    assert updates.needs_norm
    with updates.measured():
        loss_of(here, 0).backward()
    assert not updates.needs_norm
    assert all(p.grad is None for p in here.parameters()), "only the norm is left"
    before = None
    for k in range(3):
        norm = step(here, updates, k)
        loss_of(there, k).backward()
        own = after.gradient_norm()
        after.clip(own if before is None else before, 0.5)
        after.step(1e-2)
        after.zero_grad()
        before = torch.tensor(norm)
        assert norm == pytest.approx(float(own), rel=1e-5)
    assert norm > 0.5, "it is clipped at all"
    for name, value in masters(inside).items():
        torch.testing.assert_close(value, masters(after)[name], rtol=1e-5, atol=1e-6)


def test_each_tensor_may_be_clipped_by_its_own_norm() -> None:
    here, there = tiny(torch.float32), tiny(torch.float32)
    updates = BackwardUpdates(optimizer_of(here), 0.1, per_tensor=True)
    assert not updates.needs_norm
    after = optimizer_of(there)
    step(here, updates, 0)
    loss_of(there, 0).backward()
    for param in there.parameters():
        assert param.grad is not None
        param.grad.mul_(0.1 / param.grad.norm().clamp(min=0.1))
    after.step(1e-2)
    for (name, a), (_, b) in zip(here.named_parameters(), there.named_parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("late", [False, True])
def test_a_gradient_is_let_go_before_the_next_is_formed(late: bool) -> None:
    model = tiny()
    optimizer = optimizer_of(model, late)
    updates = BackwardUpdates(optimizer, 0.0)
    most = 0

    def count(_: torch.Tensor) -> None:
        nonlocal most
        most = max(most, len(optimizer._gathered()))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(count)
    step(model, updates, 0)
    assert most <= 1, "a weight's or a bias's"
    assert optimizer.gradients() == {}


@pytest.mark.parametrize("late", [False, True])
def test_where_the_loss_is_not_a_number_nothing_changes(late: bool) -> None:
    model = tiny()
    optimizer = optimizer_of(model, late)
    updates = BackwardUpdates(optimizer, 1.0)
    step(model, updates, 0)
    before, states, last = masters(optimizer), {n: t.clone() for n, t in optimizer.state_tensors()}, updates
    loss = loss_of(model, 1) * float("nan")
    updates.begin(1e-2)
    updates.saw_loss(loss)
    loss.backward()
    assert not torch.isfinite(last.end())
    assert same(before, masters(optimizer))
    assert same(states, dict(optimizer.state_tensors()))
    assert steps_taken(optimizer) == 1
    assert bool(optimizer.last_norm.isfinite())  # type: ignore[union-attr]


@pytest.mark.parametrize("late", [False, True])
def test_a_tensor_whose_gradient_is_not_a_number_is_left_and_the_others_are_updated(late: bool) -> None:
    model = tiny()
    optimizer = optimizer_of(model, late)
    updates = BackwardUpdates(optimizer, 1.0)
    step(model, updates, 0)
    before = masters(optimizer)
    handle = model[0].weight.register_hook(lambda grad: grad * float("inf"))
    norm = step(model, updates, 1)
    handle.remove()
    assert norm != norm or norm == float("inf")
    moved = {name for name, value in masters(optimizer).items() if not torch.equal(value, before[name])}
    assert moved == set(before) - {"0.weight"}
    # The count goes on everywhere: a checkpoint has one for all.
    assert {int(state["step"]) for state in optimizer._states.values()} == {2}
    assert optimizer.numbers()["last_norm"] < 1e6, "of the last sound step"
    step(model, updates, 2)
    assert not torch.equal(masters(optimizer)["0.weight"], before["0.weight"])


def test_the_norm_that_the_next_step_clips_by_comes_back() -> None:
    model = tiny(torch.float32)
    optimizer = optimizer_of(model)
    updates = BackwardUpdates(optimizer, 0.5)
    assert optimizer.numbers() == {}
    step(model, updates, 0)
    other = optimizer_of(tiny(torch.float32))
    other.load_numbers(optimizer.numbers())
    assert torch.equal(other.last_norm, optimizer.last_norm)  # type: ignore[arg-type]
    other.load_numbers({})
    assert other.last_norm is None


def test_looking_at_gradients_changes_nothing_and_keeps_none() -> None:
    model = tiny()
    optimizer = optimizer_of(model)
    before = masters(optimizer)
    with seen_gradients(optimizer) as seen:
        loss_of(model, 0).backward()
        assert optimizer.gradients() == {}
    assert set(seen) == set(optimizer.params)
    assert all(bool(looked.any) and bool(looked.finite) for looked in seen.values())
    assert same(before, masters(optimizer))
    loss_of(model, 0).backward()
    assert set(optimizer.gradients()) == set(optimizer.params), "and afterwards they are there again"


def test_updates_that_are_dropped_leave_no_memory_behind() -> None:
    model = tiny()
    optimizer = optimizer_of(model)
    updates = BackwardUpdates(optimizer, 0.0)
    step(model, updates, 0)
    left = [weakref.ref(optimizer), weakref.ref(updates)]
    del optimizer, updates
    gc.collect()
    assert [ref() for ref in left] == [None, None]
