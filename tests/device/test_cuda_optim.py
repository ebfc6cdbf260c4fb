"""On one NVIDIA card: AdamW's update and the gradients' norm against their definitions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from device_cases.optimizer import RATES, slots
from torch.optim.adamw import adamw

from erniekit.kernels.adamw import FusedAdamW, norm_reference, reference
from erniekit.kernels.adamw_slot import Slot

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]

KINDS = ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.float32, None))


def copies(given: Sequence[Slot]) -> list[Slot]:
    return [Slot(*(None if t is None else t.clone() for t in slot)) for slot in given]  # type: ignore[arg-type]


def far(got: Sequence[Slot], want: Sequence[Slot], before: Sequence[Slot]) -> float:
    """The largest |x - ref| of any element over what an update moves an element by, of weights and both moments."""
    assert [float(s.step) for s in got] == [float(s.step) for s in want]
    for slot in got:
        assert slot.weight is None or torch.equal(slot.weight, slot.master.to(slot.weight.dtype))
    worst = 0.0
    for column in (1, 2, 3):
        x, y, z = (torch.cat([s[column].flatten() for s in which]).double() for which in (got, want, before))  # type: ignore[union-attr]
        worst = max(worst, float((x - y).abs().max() / (y - z).square().mean().sqrt()))
    return worst


def test_an_update_is_its_definition() -> None:
    """Odd sizes, many small tensors, one that does not lie on 16 bytes."""
    sizes = [(1,), (3,), (17, 3), (1023,), (4096,), (4097,), (1000, 333), *[(n % 67 + 1,) for n in range(1500)]]
    scale, good = torch.tensor(0.37, device="cuda"), torch.ones((), device="cuda")
    for grad, weight in KINDS:
        given = slots([*sizes, (998,)], grad, weight)
        want, outcomes = copies(given), []
        reference(want, RATES, scale, good)
        for variant in ((1024, 4, 8), (512, 8, 4)):
            got = [*copies(given[:-1]), off_by_one(given[-1])]
            FusedAdamW(*variant).update("", got, RATES, scale, good)
            error = far(got, want, given)
            assert error < 1e-3, f"{grad} {weight} {variant}: {error:.1e}"  # fp32 rounding, against a small move
            outcomes.append(got)
        assert far(*outcomes, given) < 1e-3, "another launch may contract other products, no more"


def test_moments_in_16_bit_are_rounded_as_the_definition_says() -> None:
    sizes = [(1,), (17, 3), (4097,), (1000, 333)]
    for stochastic in (True, False):
        rates = RATES._replace(stochastic=stochastic)
        given = slots(sizes, torch.bfloat16, torch.bfloat16, moment=torch.bfloat16)
        want, got = copies(given), copies(given)
        for _ in range(3):
            reference(want, rates)
            FusedAdamW().update("", got, rates)
            for a, b in zip(want, got):
                torch.testing.assert_close(b.master, a.master, rtol=1e-5, atol=1e-7)
                for x, y in ((a.average, b.average), (a.square, b.square)):
                    # Neighbours where fp32 values differ in their last bit, and with them what chance is drawn.
                    torch.testing.assert_close(y.float(), x.float(), rtol=2**-6, atol=0)
                    same = float((x == y).float().mean())
                    assert x.numel() < 100 or same > 0.6, (stochastic, same)
            want = copies(got)


def off_by_one(slot: Slot) -> Slot:
    """The same values one element behind an address that lies on 16 bytes."""
    rooms = [None if t is None else t.new_empty(t.numel() + 1)[1:].view_as(t) if t.dim() else t.clone() for t in slot]
    return Slot(*(None if room is None else room.copy_(t) for room, t in zip(rooms, slot)))  # type: ignore[arg-type]


def test_an_update_is_torchs_fused_one() -> None:
    given = slots([(1000, 777), (5,)], torch.float32, None)
    ours, theirs = copies(given), copies(given)
    FusedAdamW().update("", ours, RATES)
    adamw(
        [s.master for s in theirs], [s.grad for s in theirs], [s.average for s in theirs], [s.square for s in theirs],
        [], [s.step for s in theirs], fused=True, amsgrad=False, lr=RATES.lr, beta1=0.9, beta2=0.95,
        weight_decay=RATES.weight_decay, eps=RATES.eps, maximize=False,
    )  # fmt: skip
    error = far(ours, theirs, given)
    assert error < 1e-3


def test_a_bad_step_changes_no_bit() -> None:
    got = slots([(1000, 77), (5,)], torch.bfloat16, torch.bfloat16)
    want = copies(got)
    got[0].grad.fill_(float("nan"))
    nan = torch.full((), float("nan"), device="cuda")
    FusedAdamW().update("", got, RATES, nan, torch.zeros((), device="cuda"))
    for a, b in zip(got, want):
        assert all(torch.equal(x, y) for x, y in zip(a[1:], b[1:]) if isinstance(x, torch.Tensor))


def part_of(slot: Slot, which: slice) -> Slot:
    return Slot(*(t[which] if isinstance(t, torch.Tensor) and t.dim() else t for t in slot))  # type: ignore[arg-type]


def test_a_tensor_of_more_than_two_to_the_31_elements_is_updated_to_its_end() -> None:
    count = 2**31 + 12345
    (big,) = slots([(count,)], torch.bfloat16, torch.bfloat16)
    places = [slice(0, 5000), slice(2**31 - 3000, 2**31 + 3000), slice(count - 5000, count)]
    want = copies([part_of(big, p) for p in places])
    before = copies(want)
    fused = FusedAdamW()
    norm = fused.norm("", [big.grad])
    exact = sum(part.double().square().sum() for part in big.grad.split(2**28)).sqrt()  # type: ignore[union-attr]
    fused.update("", [big], RATES)
    for w in want:
        reference([w], RATES)
    got = [part_of(big, p) for p in places]
    error, off = far(got, want, before), abs(float(norm / exact) - 1)
    assert error < 1e-3
    assert off < 1e-6


def test_a_norm_is_its_definition_and_the_same_every_time() -> None:
    shapes = [(1,), (999, 77), (4096,), *[(n % 67 + 1,) for n in range(1500)]]
    fused = FusedAdamW()
    for dtype in (torch.bfloat16, torch.float32):
        grads = [s.grad for s in slots(shapes, dtype, None)]
        exact = float(torch.cat([g.flatten().double() for g in grads]).norm())
        got = {float(fused.norm("", grads)) for _ in range(5)}
        assert len(got) == 1
        errors = [abs(norm / exact - 1) for norm in (*got, float(norm_reference(grads)))]
        assert errors[0] < 1e-6
