"""On one NVIDIA card: AdamW's update and the gradients' norm against their definitions, and against the clock.

`python tests/device/test_cuda_optim.py` runs it without pytest and prints the figures; a part that fails is told in a
line and the rest goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import pytest
import torch
from torch.optim.adamw import adamw

from erniekit.kernels.adamw import FusedAdamW, Rates, Slot, norm_reference, reference

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]

RATES = Rates(1e-3, (0.9, 0.95), 1e-8, 0.1)
KINDS = ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.float32, None))
# (elements a block, blocks a program, warps): the default first.
VARIANTS = ((1024, 4, 8), (512, 8, 4), (1024, 1, 8), (1024, 4, 4), (2048, 4, 8), (2048, 2, 16), (1024, 16, 8))
LAYER_03B = ((2560, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (1024,), (1024,))
LAYER_13B = ((15360, 5120), (5120, 5120), (27648, 5120), (5120, 13824), (5120,), (5120,))
SHAPES = {
    "361M": [(103424, 1024), *LAYER_03B * 18, (1024,)],
    "2.87B": [(32000, 5120), (32000, 5120), *LAYER_13B * 8, (5120,)],
}


def slots(
    shapes: Sequence[Sequence[int]],
    grad: torch.dtype,
    weight: torch.dtype | None,
    seed: int = 0,
    moment: torch.dtype = torch.float32,
) -> list[Slot]:
    random = torch.Generator("cuda").manual_seed(seed)

    def made(shape: Sequence[int], scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=random).mul_(scale)

    out = []
    for shape in shapes:
        master = made(shape, 0.02)
        out.append(
            Slot(
                made(shape, 1e-3).to(grad), master,
                made(shape, 1e-4).to(moment), made(shape, 1e-4).square_().to(moment),
                torch.full((), 3.0, device="cuda"), None if weight is None else master.to(weight),
            )
        )  # fmt: skip
    return out


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
        print(f"update {grad} -> {weight}, {len(given)} tensors: error {error:.1e} of the move")


def test_moments_in_16_bit_are_rounded_as_the_definition_says() -> None:
    sizes = [(1,), (17, 3), (4097,), (1000, 333)]
    for fair in (True, False):
        rates = RATES._replace(fair=fair)
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
                    assert x.numel() < 100 or same > 0.6, (fair, same)
            want = copies(got)
        print(f"moments in 16 bit, fair {fair}: the last one the same in {same:.0%}")


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
    print(f"update against torch's fused one: {error:.1e} of the move")
    assert error < 1e-3


def test_a_bad_step_changes_no_bit() -> None:
    got = slots([(1000, 77), (5,)], torch.bfloat16, torch.bfloat16)
    want = copies(got)
    got[0].grad.fill_(float("nan"))
    nan = torch.full((), float("nan"), device="cuda")
    FusedAdamW().update("", got, RATES, nan, torch.zeros((), device="cuda"))
    assert all(torch.equal(x, y) for a, b in zip(got, want) for x, y in zip(a[1:], b[1:]))


def test_a_tensor_of_more_than_two_to_the_31_elements_is_updated_to_its_end() -> None:
    count = 2**31 + 12345
    (big,) = slots([(count,)], torch.bfloat16, torch.bfloat16)
    places = [slice(0, 5000), slice(2**31 - 3000, 2**31 + 3000), slice(count - 5000, count)]
    want = [Slot(*(t if not t.dim() else t[p] for t in big)) for p in places]  # type: ignore[union-attr]
    want = copies(want)
    before = copies(want)
    fused = FusedAdamW()
    norm = fused.norm("", [big.grad])
    exact = sum(part.double().square().sum() for part in big.grad.split(2**28)).sqrt()  # type: ignore[union-attr]
    fused.update("", [big], RATES)
    for w in want:
        reference([w], RATES)
    got = [Slot(*(t if not t.dim() else t[p] for t in big)) for p in places]  # type: ignore[union-attr]
    error, off = far(got, want, before), abs(float(norm / exact) - 1)
    print(f"2^31 + 12345 elements: update {error:.1e} of the move, norm {off:.1e}")
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
        print(f"norm of {dtype}: error {errors[0]:.1e}, by foreach {errors[1]:.1e}")
        assert errors[0] < 1e-6


# --- the clock ---


def ms(run: Callable[[], object], calls: int = 8) -> float:
    """A call's share of a queue of them, the median of three."""
    run()
    times = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return median(times)


def clock(size: str) -> None:
    given = slots(SHAPES[size], torch.bfloat16, torch.bfloat16)
    count = sum(s.master.numel() for s in given)
    grads = [s.grad for s in given]
    scale, good = torch.tensor(0.5, device="cuda"), torch.ones((), device="cuda")

    def line(name: str, took: float, each: int) -> None:
        print(f"  {name:44} {took:7.3f} ms {each * count / took / 1e9:6.2f} TB/s ({each} bytes)")

    print(f"{size}: {count / 1e6:.1f}M parameters in {len(given)} tensors")
    for variant in VARIANTS:
        try:
            fused = FusedAdamW(*variant)
            line(f"update {variant}", ms(lambda fused=fused: fused.update("", given, RATES, scale, good)), 28)
            line(f"norm   {variant}", ms(lambda fused=fused: fused.norm("", grads)), 2)
        except Exception as error:
            print(f"  {variant}: {type(error).__name__}: {str(error).splitlines()[0]}")
    line("norm by foreach", ms(lambda: norm_reference(grads)), 2)
    fused = FusedAdamW()
    fused.update("", given, RATES, scale, good)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(5):
        fused.norm("", grads)
        fused.update("", given, RATES, scale, good)
    print(f"  on the host a norm and an update take          {(time.perf_counter() - began) * 200:7.3f} ms")
    torch.cuda.synchronize()

    def before() -> None:
        """What there was: fp32 gradients, a sweep for the clip, torch's fused update, a sweep for the weights."""
        wide = [g.float() for g in grads]
        norm_reference(wide)
        torch._foreach_mul_(wide, scale)
        adamw(
            [s.master for s in given], wide, [s.average for s in given], [s.square for s in given], [],
            [s.step for s in given], fused=True, amsgrad=False, lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1,
            eps=1e-8, maximize=False,
        )  # fmt: skip
        for s in given:
            s.weight.copy_(s.master)  # type: ignore[union-attr]

    def now() -> None:
        fused.norm("", grads)
        fused.update("", given, RATES, scale, good)

    lean = [s._replace(average=s.average.bfloat16(), square=s.square.bfloat16()) for s in given]
    line("now, moments in 16 bit", ms(lambda lean=lean: fused.update("lean", lean, RATES, scale, good), 4), 20)
    line("before: fp32 copy, norm, clip, fused, copy", ms(before, 4), 30)
    line("now: norm and update", ms(now, 4), 30)


def test_the_clock_of_361m_parameters() -> None:
    clock("361M")


def test_the_clock_of_2870m_parameters() -> None:
    clock("2.87B")


if __name__ == "__main__":
    from cases import run_all

    run_all(globals())
