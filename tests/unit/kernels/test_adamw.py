"""AdamW over many tensors: the definition is torch's, and the kernels do what the definition says.

The kernels are interpreted by Triton; where it was imported to compile them, in a process of their own.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from erniekit.kernels.adamw import FusedAdamW, check_reference, norm_reference, reference, stochastic_bf16
from erniekit.kernels.adamw_slot import Rates, Slot
from support.interpreted import run_interpreted

RATES = Rates(1e-2, (0.9, 0.95), 1e-8, 0.1)
LENGTHS = (1, 7, 16, 63, 64, 65, 300, 0, 257)  # around a block of 64 and a chunk of 128; the fastest sizes are larger


def slots(
    grad: torch.dtype,
    weight: torch.dtype | None,
    seed: int = 0,
    shift: int = 0,
    moment: torch.dtype = torch.float32,
) -> list[Slot]:
    """shift: elements between a tensor's address and the next that lies on 16 bytes."""
    random = torch.Generator().manual_seed(seed)

    def made(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(n + shift, generator=random).to(dtype)[shift:]

    return [
        Slot(
            made(n, grad), made(n), made(n, moment), made(n, moment).square(), torch.tensor(float(k)),
            None if weight is None else made(n, weight),
        )
        for k, n in enumerate(LENGTHS)
    ]  # fmt: skip


def copies(given: list[Slot]) -> list[Slot]:
    return [Slot(*(None if t is None else t.clone() for t in slot)) for slot in given]  # type: ignore[arg-type]


def far(one: list[Slot], other: list[Slot], fp32: float, low: float, moments: float | None = None) -> None:
    for a, b in zip(one, other):
        assert torch.equal(a.step, b.step)
        for x, y, most in zip(a[:4], b[:4], (fp32, fp32, *[fp32 if moments is None else moments] * 2)):
            torch.testing.assert_close(x, y, rtol=most, atol=most)
        if a.weight is not None and b.weight is not None:
            torch.testing.assert_close(a.weight.float(), b.weight.float(), rtol=low, atol=low)


def test_the_definition_is_torchs_adamw() -> None:
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(50))
    theirs = torch.optim.AdamW([param], lr=RATES.lr, betas=RATES.betas, eps=RATES.eps, weight_decay=0.1)
    zeros = [torch.zeros(50) for _ in range(2)]
    slot = Slot(torch.empty(50), param.detach().clone(), *zeros, torch.zeros(()), torch.empty(50).bfloat16())
    for _ in range(4):
        param.grad = torch.randn(50)
        slot.grad.copy_(param.grad * 2)
        reference([slot], RATES, scale=torch.tensor(0.5), good=torch.ones(()))
        theirs.step()
    torch.testing.assert_close(slot.master, param.detach(), rtol=1e-6, atol=1e-7)
    assert slot.weight is not None
    assert torch.equal(slot.weight, slot.master.bfloat16())


def test_a_moment_in_16_bit_is_rounded_up_or_down_so_that_the_mean_is_right() -> None:
    lower, upper = 1.0, 1.0078125  # neighbours in bf16
    for share in (0.1, 0.5, 0.9):
        value = torch.full((1,), lower + share * (upper - lower))
        drawn = [
            float(stochastic_bf16(value, torch.tensor(float(step)), which))
            for step in range(1, 2001)
            for which in (0, 1)
        ]
        assert set(drawn) == {lower, upper}
        risen = sum(x == upper for x in drawn) / len(drawn)
        assert abs(risen - share) < 0.03  # 4000 draws: a deviation of 0.008 at most
    many = torch.randn(20000, generator=torch.Generator().manual_seed(0))
    made = stochastic_bf16(many, torch.tensor(7.0), 0).float()
    assert torch.equal(made, stochastic_bf16(many, torch.tensor(7.0), 0).float())
    assert ((made - many).abs() <= many.abs() * 2**-7).all()
    assert abs(float((made - many).mean())) < 1e-4  # errors of up to 0.8 % of 1, 20000 of them
    kept = torch.tensor([0.0, -0.0, 1.5, -2.0, float("inf"), float("-inf")])
    assert torch.equal(stochastic_bf16(kept, torch.tensor(3.0), 1).float(), kept), "what bf16 can say stays"
    assert stochastic_bf16(torch.tensor([float("nan")]), torch.tensor(3.0), 1).isnan().all()


def test_a_second_moment_in_16_bit_falls_when_gradients_vanish_and_to_the_nearest_it_never_would() -> None:
    left = {}
    for stochastic in (True, False):
        rates = Rates(0.0, (0.9, 0.999), 1e-8, 0.0, stochastic)
        ones = torch.ones(4000).bfloat16()
        slot = Slot(torch.zeros(4000), torch.zeros(4000), ones.clone(), ones.clone(), torch.zeros(()))
        for _ in range(200):
            reference([slot], rates)
        left[stochastic] = float(slot.square.float().mean())
    assert left[False] == 1.0
    assert left[True] == pytest.approx(0.999**200, rel=0.01)  # 0.8186


def test_where_nothing_may_change_the_definition_changes_nothing() -> None:
    given = slots(torch.float32, torch.bfloat16)
    before = copies(given)
    reference(given, RATES, good=torch.zeros(()))
    far(before, given, 0.0, 0.0)


def test_a_norm_of_16_bit_gradients_is_taken_in_fp32() -> None:
    grads = [torch.full((5000,), 0.01).bfloat16(), torch.full((3000,), 0.02).bfloat16()]
    want = torch.cat(grads).double().norm()
    assert float(norm_reference(grads)) == pytest.approx(float(want), rel=1e-6)
    assert float(norm_reference([])) == 0.0


def test_the_norm_of_a_large_gradient_on_a_cpu_is_not_too_small() -> None:
    grad = torch.randn(4_000_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    in_fp32 = float(torch._foreach_norm([grad], 2)[0])
    want = float(grad.double().norm())
    assert abs(in_fp32 / want - 1) > 1e-5, "torch adds in fp32 there: what this test is about"
    assert float(norm_reference([grad])) == pytest.approx(want, rel=1e-7)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_the_kernels_do_what_the_definition_says() -> None:
    run_interpreted(__file__)


def updates_equal_the_definition() -> None:
    fused = FusedAdamW(block=64, blocks=2, warps=1)
    for grad, moment, weight, shift, stochastic in (
        (torch.float32, torch.float32, None, 0, True),
        (torch.bfloat16, torch.float32, torch.bfloat16, 0, True),
        (torch.float32, torch.float32, torch.bfloat16, 0, True),
        (torch.bfloat16, torch.float32, torch.bfloat16, 3, True),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, 0, True),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, 3, True),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, 0, False),
    ):
        scale, good = torch.tensor(0.25), torch.ones(())
        for seed in range(2):  # the second time other tensors under the same key
            got = slots(grad, weight, seed, shift, moment)
            want = copies(got)
            rates = RATES._replace(stochastic=stochastic)
            fused.update("some", got, rates, scale, good)
            reference(want, rates, scale, good)
            # fp32 rounded in another order; one step of bf16 where a value lies between. Where that order decides how a
            # moment is rounded, it is one of its two neighbours in bf16 as well: that is rare.
            far(want, got, 1e-6, 1e-2, 1e-6 if moment == torch.float32 else 1e-2)
            if moment != torch.float32 and stochastic:  # what rounds by itself in Triton is cut off by its interpreter
                same = [torch.equal(a, b) for x, y in zip(want, got) for a, b in zip(x[2:4], y[2:4])]
                assert sum(same) > 0.6 * len(same), (stochastic, sum(same), len(same))
    assert {kind[-1] for kind in fused.tables.kinds()} == {True, False}


def plain_calls_scale_nothing_and_always_write() -> None:
    got = slots(torch.float32, None)
    want = copies(got)
    FusedAdamW(64, 2, 1).update("", got, RATES)
    reference(want, RATES)
    far(want, got, 1e-6, 0.0)


def a_bad_step_changes_no_bit() -> None:
    got = slots(torch.bfloat16, torch.bfloat16)
    got[0].grad.fill_(float("nan"))
    want = copies(got)
    FusedAdamW(64, 2, 1).update("", got, RATES, torch.tensor(float("nan")), torch.zeros(()))
    assert all(a is None or torch.equal(a, b) for x, y in zip(want, got) for a, b in zip(x[1:], y[1:]))


def tensors_in_pieces_are_updated_where_they_are() -> None:
    master, weight = torch.randn(8, 6)[:, :4], torch.randn(8, 6).bfloat16()[:, 1:5]
    got = [Slot(torch.randn(4, 8).t(), master, torch.randn(8, 4), torch.rand(8, 4), torch.ones(()), weight)]
    want = copies(got)
    FusedAdamW(64, 2, 1).update("", got, RATES)
    reference(want, RATES)
    far(want, got, 1e-6, 1e-2)


def norms_equal_the_definition() -> None:
    fused = FusedAdamW(64, 2, 1)
    for seed in range(2):
        grads = [slot.grad for grad in (torch.bfloat16, torch.float32) for slot in slots(grad, None, seed, seed)]
        got, want = fused.norm("all", grads), torch.cat([g.double() for g in grads]).norm()
        assert abs(float(got) - float(want)) < 1e-6 * float(want)
    assert float(fused.norm("none", [])) == 0.0
    grads[3][0] = float("inf")
    assert not bool(fused.norm("all", grads).isfinite())


def checked_as_defined() -> None:
    torch.manual_seed(0)
    nan, inf = float("nan"), float("inf")
    for length in (1, 700, 5000):
        grad, fused = torch.randn(length).bfloat16(), FusedAdamW(block=64, blocks=2)
        for broken in (None, nan, inf):
            grad = grad if broken is None else grad.index_fill(0, torch.tensor([0]), broken)
            for last in (None, torch.tensor(3.5), torch.tensor(0.25), torch.tensor(nan)):
                for sound in (torch.ones(()), torch.zeros(())):
                    got = fused.check("one", grad, last, sound, 1.5)
                    want = check_reference(grad.double().norm().float(), last, sound, 1.5)
                    assert float(got.good) == float(want.good)
                    if got.good:
                        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    assert float(FusedAdamW().check("none", torch.zeros(0), None, torch.ones(()), 1.5).norm) == 0.0


if __name__ == "interpreted":
    updates_equal_the_definition()
    plain_calls_scale_nothing_and_always_write()
    a_bad_step_changes_no_bit()
    tensors_in_pieces_are_updated_where_they_are()
    norms_equal_the_definition()
    checked_as_defined()
