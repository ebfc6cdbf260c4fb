"""AdamW with fp32 masters: torch's numbers, Paddle's clipping, and a state that comes back bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import Group, layer_factor, make_groups
from erniekit.optim.storage import Storage
from support.optimizer_steps import steps_taken
from support.plain_adamw import PlainAdamW


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm = nn.LayerNorm(4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def train(model: Tiny, optimizer: AdamW, steps: int, start: int = 0) -> None:
    for k in range(start, start + steps):
        ids = torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(k))
        model(ids).float().pow(2).sum().backward()
        optimizer.clip(optimizer.gradient_norm(), 1.0)
        optimizer.step(1e-2)
        optimizer.zero_grad()


def tiny(dtype: torch.dtype = torch.float32) -> Tiny:
    torch.manual_seed(3)
    return Tiny().to(dtype)


def test_fp32_steps_equal_torchs_adamw_with_the_same_clip() -> None:
    ours, theirs = tiny(), tiny()
    optimizer = AdamW(make_groups(ours.named_parameters(), 2, 0.1), (0.9, 0.95), 1e-8)
    decayed = [p for n, p in theirs.named_parameters() if "bias" not in n and "norm" not in n]
    plain = [p for n, p in theirs.named_parameters() if "bias" in n or "norm" in n]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.95)
    )
    train(ours, optimizer, 5)
    for k in range(5):
        ids = torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(k))
        theirs(ids).pow(2).sum().backward()
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in theirs.parameters()]))
        for p in theirs.parameters():
            p.grad.mul_(1.0 / norm.clamp(min=1.0))
        reference.step()
        reference.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)  # fused and for-each kernels round differently


def test_bf16_gradients_are_summed_in_fp32_and_tiny_updates_survive_in_the_master() -> None:
    model = tiny(torch.bfloat16)
    optimizer = AdamW(make_groups(model.named_parameters(), 2, 0.0), (0.9, 0.95), 1e-8)
    before = {n: m.clone() for n, m in optimizer.masters.items()}
    ids = torch.arange(5)
    for _ in range(3):
        model(ids).float().sum().backward()
    assert all(p.grad is None for p in model.parameters()), "low-precision gradients are freed as they come"
    assert all(g.dtype == torch.float32 for g in optimizer.gradients().values())
    optimizer.step(1e-6)
    moved = [n for n, m in optimizer.masters.items() if not torch.equal(m, before[n])]
    assert "layers.0.weight" in moved, "1e-6 is below bf16's spacing there, so only an fp32 master can move"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_ranks_add_up_has_a_gradient_for_every_parameter(dtype: torch.dtype) -> None:
    model = tiny(dtype)
    optimizer = AdamW(make_groups(model.named_parameters(), 2, 0.0), (0.9, 0.95), 1e-8)
    assert optimizer.gradients() == {}
    grads = optimizer.all_gradients()
    assert list(grads) == list(optimizer.params)
    assert not any(bool(grad.any()) for grad in grads.values())
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    grads["layers.0.weight"].fill_(1.0)  # as another rank's is added
    before = optimizer.masters["layers.0.weight"].clone()
    optimizer.step(1e-3)
    assert not torch.equal(optimizer.masters["layers.0.weight"], before)


def test_state_restored_into_a_new_optimizer_continues_bit_for_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        straight = tiny(dtype)
        whole = AdamW(make_groups(straight.named_parameters(), 2, 0.1), (0.9, 0.95), 1e-8)
        train(straight, whole, 6)

        first = tiny(dtype)
        a = AdamW(make_groups(first.named_parameters(), 2, 0.1), (0.9, 0.95), 1e-8)
        train(first, a, 2)
        second = tiny(dtype)
        second.load_state_dict(first.state_dict())
        b = AdamW(make_groups(second.named_parameters(), 2, 0.1), (0.9, 0.95), 1e-8)
        assert b.load(steps_taken(a), dict(a.state_tensors()), dict(a.master_tensors())) == []
        train(second, b, 4, start=2)
        assert all(torch.equal(p, q) for p, q in zip(straight.parameters(), second.parameters()))
        assert all(torch.equal(whole.masters[n], b.masters[n]) for n in whole.masters)


def lean(model: Tiny) -> AdamW:
    return AdamW(make_groups(model.named_parameters(), 2, 0.1), (0.9, 0.95), 1e-8, storage=Storage("bf16"))


def test_moments_in_16_bit_train_nearly_the_same_and_come_back_bit_for_bit() -> None:
    straight, usual = tiny(torch.bfloat16), tiny(torch.bfloat16)
    whole, full = lean(straight), AdamW(make_groups(usual.named_parameters(), 2, 0.1), (0.9, 0.95), 1e-8)
    start = {name: master.clone() for name, master in whole.masters.items()}
    train(straight, whole, 6)
    train(usual, full, 6)
    for name, master in whole.masters.items():
        moved = (full.masters[name] - start[name]).norm()
        assert (master - full.masters[name]).norm() < 0.05 * moved, name  # moments are off by 0.8 % at most, each step
    saved = dict(whole.state_tensors())
    assert {t.dtype for t in saved.values()} == {torch.bfloat16}
    assert whole.bytes_a_weight == 8
    assert full.bytes_a_weight == 12

    first = tiny(torch.bfloat16)
    a = lean(first)
    train(first, a, 2)
    second = tiny(torch.bfloat16)
    second.load_state_dict(first.state_dict())
    b = lean(second)
    assert b.load(steps_taken(a), dict(a.state_tensors()), dict(a.master_tensors())) == []
    train(second, b, 4, start=2)
    assert all(torch.equal(whole.masters[n], b.masters[n]) for n in whole.masters)
    assert all(torch.equal(t, saved[n]) for n, t in b.state_tensors())


def test_a_card_rounds_moments_as_a_cpu_does() -> None:
    here, there = tiny(torch.bfloat16), tiny(torch.bfloat16)
    a, b = lean(here), lean(there)
    b.fused = PlainAdamW()  # type: ignore[assignment]
    train(here, a, 1)
    train(there, b, 1)
    theirs = dict(b.state_tensors())
    for name, moment in a.state_tensors():
        torch.testing.assert_close(moment.float(), theirs[name].float(), rtol=2**-7, atol=0)


def on_a_card(model: Tiny) -> AdamW:
    """As there, with the kernels' definition in their place."""
    optimizer = AdamW(make_groups(model.named_parameters(), 2, 0.1), (0.9, 0.95), 1e-8)
    optimizer.fused = PlainAdamW()  # type: ignore[assignment]
    return optimizer


def test_the_way_of_a_card_gives_the_numbers_of_a_cpu() -> None:
    for dtype, most in ((torch.float32, 1e-6), (torch.bfloat16, 1e-6)):  # of masters: fp32 rounded in another order
        here, there = tiny(dtype), tiny(dtype)
        a = AdamW(make_groups(here.named_parameters(), 2, 0.1), (0.9, 0.95), 1e-8)
        b = on_a_card(there)
        train(here, a, 1)
        train(there, b, 1)
        for name, master in a.masters.items():
            torch.testing.assert_close(b.masters[name], master, rtol=0, atol=most)
        assert steps_taken(a) == steps_taken(b) == 1


def test_a_single_micro_batchs_gradient_stays_in_16_bit_on_a_card_and_several_are_summed_in_fp32() -> None:
    model, kinds = tiny(torch.bfloat16), []

    class Watched(PlainAdamW):
        def update(self, key: str, slots: list, *rest: object) -> None:  # type: ignore[override]
            kinds.append({slot.grad.dtype for slot in slots})
            super().update(key, slots, *rest)  # type: ignore[arg-type]

    optimizer = on_a_card(model)
    optimizer.fused = Watched()  # type: ignore[assignment]
    for count, want in ((1, torch.bfloat16), (2, torch.float32), (3, torch.float32)):
        kinds.clear()
        for _ in range(count):
            model(torch.arange(5)).float().pow(2).sum().backward()
        optimizer.step(1e-3)
        optimizer.zero_grad()
        assert kinds == [{want}] * 2, "decayed parameters and the others"


def test_an_update_the_device_refuses_leaves_weights_moments_and_counts() -> None:
    model = tiny(torch.bfloat16)
    optimizer = on_a_card(model)
    train(model, optimizer, 1)
    tensors = [*model.parameters(), *optimizer.masters.values(), *dict(optimizer.state_tensors()).values()]
    before = [t.detach().clone() for t in tensors]
    model(torch.arange(5)).float().sum().mul(float("nan")).backward()
    norm = optimizer.gradient_norm()
    optimizer.clip(norm, 1.0)
    optimizer.step(1e-2, norm.isfinite().float())
    optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(before, tensors))
    assert steps_taken(optimizer) == 1


def test_a_missing_moment_is_named() -> None:
    model = tiny()
    optimizer = AdamW(make_groups(model.named_parameters(), 2, 0.0), (0.9, 0.95), 1e-8)
    train(model, optimizer, 1)
    moments = dict(optimizer.state_tensors())
    moments.pop("norm.weight/exp_avg")
    assert optimizer.load(1, moments, {}) == ["norm.weight/exp_avg"]


def test_norms_and_biases_are_not_decayed_and_layers_can_learn_at_their_own_rate() -> None:
    groups = make_groups(tiny().named_parameters(), 2, 0.1, layerwise_bound=0.5)
    by_name = {n: g for g in groups for n in g.names}
    assert by_name["norm.weight"].weight_decay == 0
    assert by_name["layers.0.bias"].weight_decay == 0
    assert by_name["layers.0.weight"].weight_decay == 0.1
    assert by_name["embed.weight"].lr_scale == 0.5
    assert by_name["layers.1.weight"].lr_scale == 0.5 + 2 / 4 * 0.5
    assert by_name["norm.weight"].lr_scale == 1.0
    assert layer_factor("layers.0.attn.qkv.weight", 18, 1.0) == 1.0


def test_frozen_parameters_have_no_group() -> None:
    model = tiny()
    model.embed.weight.requires_grad_(False)
    names = [n for g in make_groups(model.named_parameters(), 2, 0.1) for n in g.names]
    assert "embed.weight" not in names
    assert "layers.0.weight" in names
    assert isinstance(make_groups(model.named_parameters(), 2, 0.1)[0], Group)
