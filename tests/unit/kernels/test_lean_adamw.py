"""AdamW with states in few bytes: exact masters of 16 + 16 bits, 8-bit moments, weights rounded by chance.

The kernels are interpreted by Triton; where it was imported to compile them, in a process of their own.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from erniekit.kernels import lean_adamw, moments8
from erniekit.kernels.adamw import FusedAdamW, reference, stochastic_bf16_at
from erniekit.kernels.adamw_slot import Rates, Slot
from erniekit.kernels.exact_master import join, split
from erniekit.kernels.launch_tables import LaunchTables
from erniekit.kernels.position_noise import TensorPart, draws, high16, low16, salt_of
from support.interpreted import run_interpreted

RATES = Rates(1e-2, (0.9, 0.95), 1e-8, 0.1)


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def patterns() -> torch.Tensor:
    """fp32 of random bits, and of those where rounding, exponents and signs meet."""
    drawn = torch.randint(-(2**31), 2**31, (1 << 20,), generator=random(), dtype=torch.int64)
    low = torch.tensor([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    high = torch.arange(1 << 16)[:, None] << 16
    return torch.cat((drawn, (high + low).flatten())).to(torch.int32).view(torch.float32)


# --- exact masters ---


def test_weight_and_remainder_give_back_every_bit_of_the_master() -> None:
    master = patterns()
    weight, remainder = split(master)
    sound = ~master.isnan()
    assert torch.equal(join(weight, remainder)[sound].view(torch.int32), master[sound].view(torch.int32))
    assert weight[~sound].isnan().all(), "a fault is never hidden"
    assert join(weight, remainder)[~sound].isnan().all()


def test_the_weight_is_the_nearest_bf16_and_only_ties_differ_from_torchs_rounding() -> None:
    master = patterns()
    master = master[master.isfinite()]
    weight, _ = split(master)
    differs = weight.view(torch.int16) != master.bfloat16().view(torch.int16)
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert bool(differs.any())
    assert bool(ties[differs].all())
    assert bool((weight.float().abs() > master.abs())[ties].all()), "ties go away from zero"


def test_rounded_to_even_ties_would_not_fit_the_remainder() -> None:
    tie = torch.tensor([1.0, 1.0 + 2**-7]) + 2**-8  # one goes down and one goes up when rounded to even
    off = tie.view(torch.int32) - (tie.bfloat16().view(torch.int16).to(torch.int32) << 16)
    assert off.tolist() == [0x8000, -0x8000]


def test_an_exact_master_trains_as_the_fp32_master_does_bit_for_bit() -> None:
    start = torch.randn(16, 80, generator=random(1))
    moments = [torch.zeros(16, 80) for _ in range(4)]
    wide = Slot(start, start.clone(), *moments[:2], torch.zeros(()), start.bfloat16())
    weight, remainder = split(start)
    lean = Slot(start, None, *moments[2:], torch.zeros(()), weight, remainder)
    for k in range(20):
        grad = torch.randn(16, 80, generator=random(k)).bfloat16()
        for slot in (wide, lean):
            reference([slot._replace(grad=grad)], RATES)
        assert wide.master is not None
        assert torch.equal(join(weight, remainder), wide.master)
        assert torch.equal(weight, split(wide.master)[0])
        assert torch.equal(lean.average, wide.average)


# --- draws by position ---


def test_draws_are_even_and_their_halves_do_not_follow_each_other() -> None:
    both = [draws(TensorPart(salt_of(1, "a")), torch.tensor(3.0), 500, 400, which) for which in (0, 1)]
    halves = [half(h).double() / 65536 for h in both for half in (high16, low16)]
    together = torch.corrcoef(torch.stack([half.flatten() for half in halves]))
    assert float((together - torch.eye(4)).abs().max()) < 0.01  # 200 000 draws: a deviation of 0.0022
    for half in halves:
        assert float(half.mean()) == pytest.approx(0.5, abs=0.003)
        assert float(half.var()) == pytest.approx(1 / 12, abs=0.002)
        for dim in (0, 1):  # neighbours, and whole rows and columns
            assert float((half.mean(dim) - 0.5).abs().max()) < 0.07  # 400 draws: a deviation of 0.0144


def test_draws_are_of_the_run_the_tensor_the_update_and_the_place_alone() -> None:
    place, step = TensorPart(salt_of(1, "a")), torch.tensor(3.0)
    whole = draws(place, step, 8, 12)
    part = place._replace(rows=torch.tensor([6, 1, 2], dtype=torch.int32), first_column=4)
    assert torch.equal(draws(part, step, 3, 8), whole[[6, 1, 2], 4:])
    for other in (place._replace(salt=salt_of(2, "a")), place._replace(salt=salt_of(1, "b"))):
        assert float((draws(other, step, 8, 12) == whole).float().mean()) < 0.05
    assert float((draws(place, torch.tensor(4.0), 8, 12) == whole).float().mean()) < 0.05


def test_a_weight_without_a_master_is_right_in_the_mean_and_to_the_nearest_it_never_moves() -> None:
    start = torch.full((64, 64), 1.0)
    updates = torch.full((64, 64), 1e-4)  # far below half a step of bf16 there, 2**-8
    weight, nearest = start.bfloat16(), start.bfloat16()
    for k in range(1, 101):
        weight = stochastic_bf16_at(weight.float() - updates, draws(TensorPart(7), torch.tensor(float(k)), 64, 64))
        nearest = (nearest.float() - updates).bfloat16()
    assert torch.equal(nearest, start.bfloat16())
    assert float(weight.float().mean()) == pytest.approx(0.99, abs=5e-5)
    # Independent draws would leave a deviation of sqrt(100 x 1e-4 x 2**-8) = 0.0062: more than half of the way.
    assert float(weight.float().std()) < 0.75 * 2**-8
    kept = torch.tensor([[0.0, -0.0, 1.5, -2.0, float("inf"), float("-inf")]])
    assert torch.equal(stochastic_bf16_at(kept, draws(TensorPart(7), torch.tensor(1.0), 1, 6)).float(), kept)
    nans = torch.tensor([[0x7FFFFFFF, 0x7FC00000, -1, 0x7F800001]], dtype=torch.int32).view(torch.float32)
    assert stochastic_bf16_at(nans, draws(TensorPart(7), torch.tensor(1.0), 1, 4)).isnan().all()


# --- 8-bit moments ---


def some_moments(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients' sizes spread over some four decades, as inside a row of a trained model."""
    root = torch.randn(rows, columns, generator=random(seed)).mul(1.2).exp() * 1e-4
    return torch.randn(rows, columns, generator=random(seed + 1)) * root * 0.3, root.square()


@pytest.mark.parametrize("columns", [64, 256, 300, 700])
def test_8_bit_moments_come_back_close_and_right_in_the_mean(columns: int) -> None:
    m, v = some_moments(12, columns)
    sums = torch.zeros(2, *v.shape)
    for k in range(200):
        drawn = draws(TensorPart(3), torch.tensor(float(k)), *m.shape, 1)
        *codes, scales = moments8.encode(m, v, drawn, 256)
        assert scales.update.shape == (12, -(-columns // 256))
        back = moments8.decode(codes[0], codes[1], scales, 256)
        assert float((back[1] / v - 1).abs().max()) < 0.1
        # 1/127 of the block's largest update, and what the stored v is off by
        assert float(((back[0] - m) / v.sqrt()).abs().max()) < 0.03
        sums += torch.stack(back)
    mean_m, mean_v = sums / 200
    assert float((mean_v / v - 1).abs().mean()) < 2e-3
    assert float(((mean_m - m) / v.sqrt()).abs().mean()) < 1e-3


def test_rows_keep_their_codes_when_a_tensor_is_cut_by_rows_or_at_a_block() -> None:
    m, v = some_moments(9, 600)
    whole_place, step = TensorPart(3), torch.tensor(5.0)
    whole = moments8.encode(m, v, draws(whole_place, step, 9, 600), 256)
    rows, first = [7, 2, 3], 256
    place = whole_place._replace(rows=torch.tensor(rows, dtype=torch.int32), first_column=first)
    part = moments8.encode(m[rows, first:], v[rows, first:], draws(place, step, 3, 344), 256)
    for of_part, of_whole in zip(part[:2], whole[:2]):
        assert torch.equal(of_part, of_whole[rows, first:])
    for of_part, of_whole in zip(part[2], whole[2]):
        assert torch.equal(of_part, of_whole[rows, 1:])


def test_values_at_the_ends_of_fp32_are_stored_as_numbers() -> None:
    v = torch.zeros(6, 64)
    v[1, :] = 4.0  # all alike
    v[2, ::2], v[2, 1] = 1e-30, 1e30  # further apart than the codes
    v[3, 0] = float("inf")  # a square that overflowed
    v[4, :] = 1e-42  # below the smallest that is stored
    v[5, 7] = 2.0**-126
    m = v.clamp(max=1e30).sqrt() * 0.5
    for k in range(20):
        codes_u, codes_v, scales = moments8.encode(m, v, draws(TensorPart(1), torch.tensor(float(k)), 6, 64), 64)
        back_m, back_v = moments8.decode(codes_u, codes_v, scales, 64)
        assert all(bool(t.isfinite().all()) for t in (*scales, back_m, back_v))
        assert bool((back_v[v == 0] == 0).all()), "what was never trained stays so"
        assert bool((back_m[v < 2.0**-126] == 0).all())
        assert torch.equal(back_v[1], v[1])
        assert float(back_v[2, 1]) == pytest.approx(1e30)
        assert bool((back_v[2, ::2] > 1e14).all()), "raised, so that their updates are smaller, never larger"
        assert float(back_v[3, 0]) == pytest.approx(3e38)
        assert float(back_v[5, 7]) == 2.0**-126


def eight_bit(shape: tuple[int, int], start: torch.Tensor, place: TensorPart) -> Slot:
    blocks = -(-shape[1] // place.block)
    scales = moments8.Scales(*(torch.zeros(shape[0], blocks) for _ in range(3)))
    codes = [torch.zeros(shape, dtype=torch.uint8) for _ in range(2)]
    return Slot(start, start.clone(), codes[0], codes[1], torch.zeros(()), None, None, scales, place)


def test_8_bit_moments_follow_fp32_ones_closer_than_the_usual_8_bit_adam() -> None:
    """Against bitsandbytes' formats: blocks of 256, its dynamic map, to the nearest. Gradients whose sizes differ
    inside a block and fall over the steps."""
    from bitsandbytes.functional import create_dynamic_map, dequantize_blockwise, quantize_blockwise

    shape = (8, 256)
    start = torch.randn(shape, generator=random(9))
    size = torch.randn(shape, generator=random(8)).mul(1.5).exp() * 1e-3
    rates = Rates(1e-3, (0.9, 0.999), 1e-8, 0.0)
    wide = Slot(start, start.clone(), torch.zeros(shape), torch.zeros(shape), torch.zeros(()))
    ours, peer = eight_bit(shape, start, TensorPart(5)), wide._replace(master=start.clone(), step=torch.zeros(()))
    maps = [create_dynamic_map(signed=signed) for signed in (True, False)]
    m, v = (torch.zeros(shape) for _ in range(2))
    apart = {"ours": 0.0, "peer": 0.0}
    for k in range(200):
        grad = torch.randn(shape, generator=random(100 + k)) * size * 0.99**k
        reference([wide._replace(grad=grad)], rates)
        reference([ours._replace(grad=grad)], rates)
        reference([peer._replace(grad=grad, average=m, square=v)], rates)
        # bitsandbytes' blocks run over the flat tensor: here a row is a block
        m, v = (
            dequantize_blockwise(*quantize_blockwise(t.flatten(), code=code, blocksize=256)).view(shape)
            for t, code in zip((m, v), maps)
        )
    for name, slot in (("ours", ours), ("peer", peer)):
        assert slot.master is not None
        assert wide.master is not None
        apart[name] = float((slot.master - wide.master).norm() / (wide.master - start).norm())
    assert apart["ours"] < 0.08, apart  # 0.05; the peer 0.36
    assert apart["ours"] < 0.25 * apart["peer"], apart


# --- the kernels ---


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_the_kernels_do_what_the_definition_says() -> None:
    run_interpreted(__file__)


SHAPES = ((2, 64), (1, 300), (2, 96), (1, 128))  # few rows: the interpreter takes 80 ms for each block of 64


def slots(mode: str, moment: torch.dtype, grad: torch.dtype, seed: int) -> list[Slot]:
    out = []
    for k, shape in enumerate(SHAPES):
        start = torch.randn(shape, generator=random(seed + k))
        place = TensorPart(salt_of(seed, str(k)), None, 0, 64)
        if k == 2:
            place = place._replace(rows=torch.tensor([9, 1], dtype=torch.int32), first_column=64)
        m, v = some_moments(*shape, seed=seed + 10 * k)
        slot = Slot((torch.randn(shape, generator=random(k)) * 1e-4).to(grad), None, m, v, torch.tensor(float(k)))
        if moment == torch.uint8:
            *codes, scales = moments8.encode(m, v, draws(place, slot.step, *shape), 64)
            slot = slot._replace(average=codes[0], square=codes[1], scales=scales)
        else:
            slot = slot._replace(average=m.to(moment), square=v.to(moment))
        weight, remainder = split(start)
        stored = {
            "fp32": dict(master=start),
            "copy": dict(master=start, weight=weight),
            "exact": dict(weight=weight, remainder=remainder),
            "none": dict(weight=weight),
        }[mode]
        out.append(slot._replace(place=place, **stored))  # type: ignore[arg-type]
    return out


def copied(given: list[Slot]) -> list[Slot]:
    def clone(t: object) -> object:
        if isinstance(t, moments8.Scales):
            return moments8.Scales(*(s.clone() for s in t))
        return t.clone() if isinstance(t, torch.Tensor) else t

    return [Slot(*map(clone, slot)) for slot in given]  # type: ignore[arg-type]


def share_equal(want: list[torch.Tensor], got: list[torch.Tensor]) -> float:
    return float(torch.cat([(a == b).flatten() for a, b in zip(want, got)]).float().mean())


def updates_equal_the_definition() -> None:
    for mode, moment, grad in (
        ("exact", torch.uint8, torch.bfloat16),
        ("none", torch.uint8, torch.bfloat16),
        ("fp32", torch.uint8, torch.float32),
        ("copy", torch.uint8, torch.bfloat16),
        ("exact", torch.float32, torch.bfloat16),
        ("none", torch.bfloat16, torch.float32),
    ):
        got = slots(mode, moment, grad, 3)
        want = copied(got)
        scale, good = torch.tensor(0.5), torch.ones(())
        FusedAdamW(64, 2, 1).update("some", got, RATES, scale, good)
        reference(want, RATES, scale, good)
        for a, b in zip(want, got):
            assert torch.equal(a.step, b.step)
            if a.master is not None and b.master is not None:
                torch.testing.assert_close(a.master, b.master, rtol=1e-5, atol=1e-6)
            if a.remainder is not None and a.weight is not None and b.weight is not None and b.remainder is not None:
                masters = [join(s.weight, s.remainder) for s in (a, b)]  # type: ignore[arg-type]
                torch.testing.assert_close(*masters, rtol=1e-5, atol=1e-6)
                assert torch.equal(b.weight, split(masters[1])[0])
            if a.scales is not None and b.scales is not None:
                for x, y in zip(a.scales, b.scales):
                    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
                assert share_equal([a.average, a.square], [b.average, b.square]) > 0.98, mode
            elif moment == torch.float32:
                torch.testing.assert_close(a.average, b.average, rtol=1e-5, atol=1e-9)
        if mode == "none":  # rounded by the same draws, so that only what lies between differs
            assert share_equal([s.weight for s in want], [s.weight for s in got]) > 0.99  # type: ignore[misc]


def a_bad_step_changes_no_bit() -> None:
    for mode in ("exact", "none"):
        got = slots(mode, torch.uint8, torch.bfloat16, 5)
        got[0].grad.fill_(float("nan"))
        want = copied(got)
        FusedAdamW(64, 2, 1).update("", got, RATES, torch.tensor(float("nan")), torch.zeros(()))
        for a, b in zip(want, got):
            for x, y in zip((*a[1:7], *a.scales), (*b[1:7], *b.scales)):  # type: ignore[misc]
                assert x is None or torch.equal(x, y)


def tensors_of_one_dim_and_none_at_all_are_updated() -> None:
    start = torch.randn(70, generator=random())
    weight, remainder = split(start)
    slot = Slot(torch.randn(70), None, torch.zeros(70), torch.zeros(70), torch.zeros(()), weight, remainder)
    want = copied([slot])
    FusedAdamW(64, 2, 1).update("", [slot], RATES)
    reference(want, RATES)
    masters = [join(s.weight, s.remainder) for s in (want[0], slot)]  # type: ignore[arg-type]
    torch.testing.assert_close(*masters, rtol=1e-5, atol=1e-6)
    empty = Slot(*(t[:0] if isinstance(t, torch.Tensor) and t.dim() else t for t in slot))  # type: ignore[arg-type]
    lean_adamw.update(LaunchTables(), "", [empty], RATES)


def blocks_that_fill_rows_are_read_16_bytes_at_a_time() -> None:
    tables = LaunchTables()
    lean_adamw.update(tables, "", slots("exact", torch.uint8, torch.bfloat16, 3)[2:], RATES, elements=128)
    assert {kind.even for kind in tables.kinds()} == {True, False}


if __name__ == "interpreted":
    updates_equal_the_definition()
    a_bad_step_changes_no_bit()
    tensors_of_one_dim_and_none_at_all_are_updated()
    blocks_that_fill_rows_are_read_16_bytes_at_a_time()
