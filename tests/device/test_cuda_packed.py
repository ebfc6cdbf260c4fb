"""8- and 4-bit weights on a card: the same bytes and numbers as on a CPU, bit for bit, and nothing waits."""

from __future__ import annotations

import pytest
import torch

from erniekit.kernels.expert_reference import add_low
from erniekit.kernels.grouped_gemm import product_reference
from erniekit.kernels.stored import Stored, kind_named, kind_of
from erniekit.weight_kinds import IN_FP8, WEIGHT_KINDS

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]

EXPERTS, OUT, IN = 3, 272, 320  # no multiples of a tile


def both(kind: str) -> tuple[Stored, Stored]:
    """On the CPU and on the card, of the same weight."""
    torch.manual_seed(0)
    w = torch.randn(EXPERTS * OUT, IN) * 0.02
    w[1, :64] *= 16
    w[2] = 0
    here, there = (kind_named(kind).pack(w.bfloat16().to(device)) for device in ("cpu", "cuda"))
    return here.of_experts(EXPERTS), there.of_experts(EXPERTS)


@pytest.mark.parametrize("kind", [kind for kind in WEIGHT_KINDS if kind not in ("plain", "fp8", "int4-group")])
def test_bytes_and_numbers_are_those_of_a_cpu(kind: str) -> None:
    here, there = both(kind)
    assert here.kind == there.kind
    for a, b in zip(here[:3], there[:3], strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b.cpu())
    for dtype in (torch.bfloat16, torch.float32):
        got = kind_of(there).unpack(there, dtype)
        # A bf16 number of nf4 is rounded from a product that the card may fuse; all others are exact before.
        torch.testing.assert_close(got.cpu(), kind_of(here).unpack(here, dtype), rtol=0, atol=0)


def test_a_clipped_group_is_as_good_as_on_a_cpu() -> None:
    """Its errors are sums, which a card adds up in another order: of two shares as good it may take the other."""
    here, there = both("int4-group")
    assert (here.data != there.data.cpu()).float().mean() < 0.01


@pytest.mark.parametrize("kind", ["int4", "mxfp4"])
def test_the_image_in_fp8_times_its_scale_is_the_unpacked_weight(kind: str) -> None:
    _, there = both(IN_FP8[kind])
    fp8 = kind_of(there)
    exact = kind_named(kind).unpack(there._replace(kind=kind), torch.float32)
    assert torch.equal(fp8.image(there).float() * fp8.row_scale(there), exact)
    turned = fp8.turned_image(there).float() * fp8.row_scale(there).transpose(1, 2)
    assert torch.equal(turned, exact.transpose(1, 2))


@pytest.mark.parametrize("kind", [kind for kind in WEIGHT_KINDS if kind not in ("plain", "fp8")])
def test_products_by_expert_both_ways_without_waiting(kind: str) -> None:
    if kind_named(kind).why_not(torch.device("cuda"), True) is not None:
        pytest.skip("fp8 products of experts are for Hopper")
    _, there = both(kind)
    w = kind_of(there).unpack(there, torch.float32)
    ends = torch.tensor([5, 5, 64], dtype=torch.int32, device="cuda")
    x = torch.randn(64, IN, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(64, OUT, device="cuda", dtype=torch.bfloat16)
    calls = (
        (lambda: kind_of(there).grouped(x, there, ends, torch.bfloat16), x, w.transpose(1, 2)),
        (lambda: kind_of(there).turned_grouped(grad, there, ends, torch.bfloat16), grad, w),
    )
    for call, rows, weight in calls:
        call()  # kernels are built
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        want = torch.cat([rows[:5].float() @ weight[0], rows[5:].float() @ weight[2]])
        off = float((got.float() - want).norm() / want.norm())
        assert off < (0.05 if kind_of(there).rows_in_fp8 else 0.005)


@pytest.mark.parametrize("ranks", [(32,), (32, 8)])
@pytest.mark.parametrize("kind", ["plain", "int4"])
def test_updates_are_added_in_the_pass_of_a_product_both_ways(kind: str, ranks: tuple[int, ...]) -> None:
    _, there = both(kind)
    held, w = kind_of(there), kind_of(there).unpack(there, torch.bfloat16)
    ends = torch.tensor([5, 5, 300], dtype=torch.int32, device="cuda")
    calls = ((held.grouped_plus, w.transpose(1, 2), IN, OUT), (held.turned_grouped_plus, w, OUT, IN))
    for call, weight, width, out in calls:
        rows = torch.randn(300, width, device="cuda", dtype=torch.bfloat16)
        tails = [
            (
                torch.randn(300, n, device="cuda", dtype=torch.bfloat16),
                torch.randn(EXPERTS, n, out, device="cuda", dtype=torch.bfloat16) * 0.02,
            )
            for n in ranks
        ]
        call(rows, there, ends, torch.bfloat16, tails, 2.0)  # kernels are built
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = call(rows, there, ends, torch.bfloat16, tails, 2.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if torch.cuda.get_device_capability() != (9, 0):
            assert got is None
            continue
        plain = product_reference(rows.float(), weight.float(), ends)
        want = add_low(plain, [(z.float(), by.float()) for z, by in tails], 2.0, ends)
        assert float((got.float() - want).norm() / want.norm()) < 0.003
