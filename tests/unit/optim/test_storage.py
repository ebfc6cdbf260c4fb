"""What an optimiser keeps of a weight, in every form: the same training, restored bit for bit, and one form from
another."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from erniekit.kernels.exact_master import join, split
from erniekit.kernels.position_noise import TensorPart, salt_of
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.storage import Storage
from support.optimizer_steps import steps_taken
from support.plain_adamw import PlainAdamW

WIDTH = 80
FORMS = list(itertools.product(("fp32", "bf16", "8bit"), ("fp32", "exact16", "none")))
BYTES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 + 12 / WIDTH}  # one short block a row


def tiny(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))).to(dtype)


def optimizer_of(model: nn.Module, late: bool = False, **form: Any) -> AdamW:
    out = AdamW(make_groups(model.named_parameters(), 2, 0.1), (0.9, 0.95), 1e-8, storage=Storage(**form))
    if late:
        out.fused = PlainAdamW()  # type: ignore[assignment]
    return out


def train(model: nn.Module, optimizer: AdamW, steps: range, lr: float = 1e-3) -> None:
    first = next(model.parameters())
    for k in steps:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(k)).to(first.dtype)
        model(x).float().pow(2).sum().backward()
        optimizer.clip(optimizer.gradient_norm(), 1.0)
        optimizer.step(lr)
        optimizer.zero_grad()


def outcome(model: nn.Module, optimizer: AdamW) -> dict[str, torch.Tensor]:
    states = {**dict(optimizer.state_tensors()), **{f"{n}/@": m for n, m in optimizer.master_tensors()}}
    return {name: t.detach().clone() for name, t in {**model.state_dict(), **states}.items()}


def restored(source: AdamW, model: nn.Module, into: AdamW) -> list[str]:
    into.refresh_masters()
    return into.load(steps_taken(source), dict(source.state_tensors()), dict(source.master_tensors()))


@pytest.mark.parametrize(("moments", "masters"), FORMS)
@pytest.mark.parametrize("late", [False, True])
def test_every_form_comes_back_bit_for_bit(moments: str, masters: str, late: bool) -> None:
    form = dict(moments=moments, masters=masters, seed=7, late=late)
    straight = tiny()
    whole = optimizer_of(straight, **form)
    train(straight, whole, range(5))
    first, second = tiny(), tiny()
    before, after = optimizer_of(first, **form), optimizer_of(second, **form)
    train(first, before, range(2))
    train(second, after, range(7, 9))  # has states of its own, which the restored ones replace
    second.load_state_dict(first.state_dict())
    assert restored(before, second, after) == []
    train(second, after, range(2, 5))
    want, got = outcome(straight, whole), outcome(second, after)
    assert list(want) == list(got)
    assert [name for name in want if not torch.equal(want[name], got[name])] == []


@pytest.mark.parametrize(("moments", "masters"), FORMS)
def test_every_form_takes_the_bytes_it_says(moments: str, masters: str) -> None:
    model = tiny()
    optimizer = optimizer_of(model, moments=moments, masters=masters)
    train(model, optimizer, range(1))
    held = [t for n, t in (*optimizer.state_tensors(), *optimizer.master_tensors()) if n.startswith("0.weight")]
    taken = sum(t.numel() * t.element_size() for t in held) / WIDTH**2
    assert taken == pytest.approx({"fp32": 4, "exact16": 2, "none": 0}[masters] + BYTES[moments])
    everything = [t for _, t in (*optimizer.state_tensors(), *optimizer.master_tensors())]
    count = sum(p.numel() for p in model.parameters())
    size = sum(t.numel() * t.element_size() for t in everything)
    assert optimizer.bytes_a_weight * count == pytest.approx(size)


def test_exact_masters_train_as_fp32_ones_that_round_half_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, masters and moments. The one difference to an fp32 master is how a tie becomes a 16-bit weight."""
    from erniekit.kernels import adamw as kernels

    plain_pack = kernels.pack

    def half_up(slot: Any, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, stochastic: bool) -> None:
        plain_pack(slot, p, m, v, stochastic)
        if slot.master is not None and slot.weight is not None:
            slot.weight.copy_(split(slot.master)[0])

    exact, wide = tiny(), tiny()
    lean = optimizer_of(exact, masters="exact16")
    train(exact, lean, range(6))
    monkeypatch.setattr("erniekit.optim.adamw.pack", half_up)
    copied = optimizer_of(wide)
    train(wide, copied, range(6))
    for name, param in exact.named_parameters():
        assert torch.equal(join(param.detach(), lean.remainders[name]), copied.masters[name])
        assert torch.equal(param, dict(wide.named_parameters())[name])
    theirs = dict(copied.state_tensors())
    assert all(torch.equal(t, theirs[name]) for name, t in lean.state_tensors())


@pytest.mark.parametrize("source", ["fp32", "exact16"])
@pytest.mark.parametrize("target", ["fp32", "exact16", "none"])
def test_masters_of_one_form_are_read_into_another(source: str, target: str) -> None:
    first, second = tiny(), tiny()
    before = optimizer_of(first, masters=source)
    train(first, before, range(3))
    after = optimizer_of(second, masters=target)
    second.load_state_dict(first.state_dict())
    assert restored(before, second, after) == []
    for name, param in first.named_parameters():
        master = before.masters[name] if source == "fp32" else join(param.detach(), before.remainders[name])
        if name in after.masters:
            assert torch.equal(after.masters[name], master)
        elif name in after.remainders:
            there = dict(second.named_parameters())[name].detach()
            assert torch.equal(join(there, after.remainders[name]), master)


@pytest.mark.parametrize("source", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("target", ["fp32", "bf16", "8bit"])
def test_moments_of_one_form_are_read_into_another(source: str, target: str) -> None:
    first, second = tiny(), tiny()
    before, after = (optimizer_of(m, moments=form) for m, form in ((first, source), (second, target)))
    train(first, before, range(4))
    second.load_state_dict(first.state_dict())
    assert restored(before, second, after) == []
    # One more step from either: the weights differ by what the forms lose of an update, at most a tenth of it.
    start = {n: p.detach().float().clone() for n, p in first.named_parameters()}
    for model, optimizer in ((first, before), (second, after)):
        train(model, optimizer, range(4, 5))
    for name in ("0.weight", "1.weight"):
        moved = before.masters[name] - start[name]
        assert float((after.masters[name] - before.masters[name]).norm() / moved.norm()) < 0.1


def test_a_checkpoint_without_what_a_form_needs_is_said_to_lack_it() -> None:
    first, second = tiny(), tiny()
    before = optimizer_of(first, masters="none")
    train(first, before, range(2))
    after = optimizer_of(second, masters="exact16")
    assert restored(before, second, after) == ["0.weight", "1.weight"]
    assert "0.weight/exp_avg" in after.load(2, {}, dict(before.master_tensors()))


def test_a_rank_with_some_rows_and_columns_draws_what_the_whole_tensor_would() -> None:
    """Stochastic rounding under another layout: the same weights bit for bit, from the same gradients."""
    torch.manual_seed(0)
    start, grads = torch.randn(12, 512).bfloat16(), [torch.randn(12, 512).bfloat16() for _ in range(3)]
    rows = [9, 2, 3]
    salt = salt_of(5, "w")
    part_place = TensorPart(salt, torch.tensor(rows, dtype=torch.int32), 256, 256)
    out = []
    for value, place, cut in (
        (start, TensorPart(salt), (slice(None), slice(None))),
        (start[rows, 256:].contiguous(), part_place, (rows, slice(256, None))),
    ):
        model = nn.ParameterDict({"w": nn.Parameter(value.clone())})
        storage = Storage("8bit", "none", seed=5, places={"w": place})
        groups = make_groups(model.named_parameters(), 1, 0.1)
        optimizer = AdamW(groups, (0.9, 0.95), 1e-8, storage=storage)
        for grad in grads:
            model["w"].grad = grad[cut].clone()
            optimizer.step(1e-2)
            optimizer.zero_grad()
        out.append((model["w"].detach(), dict(optimizer.state_tensors())))
    (whole, states), (part, part_states) = out
    assert torch.equal(part, whole[rows, 256:])
    assert torch.equal(part_states["w/exp_avg"], states["w/exp_avg"][rows, 256:])
    assert torch.equal(part_states["w/exp_avg_sq_span#256"], states["w/exp_avg_sq_span#256"][rows, 1:])
