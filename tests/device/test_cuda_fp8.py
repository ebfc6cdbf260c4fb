"""A frozen base in fp8 on a Hopper card: how far products, the expert block and adapters' gradients are from exact, and
that nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from device_cases.fp8 import RANK, H, K, W, block, expert_mlp, normal, packed, routed

from erniekit.kernels import expert_reference
from erniekit.kernels import fp8_product as fp8
from erniekit.kernels.lora_linear import RowUpdate, lora_linear
from erniekit.kernels.quantised_rows import (
    by_expert_reference,
    dequantised,
    quantised,
    quantised_by_expert,
    quantised_with,
    reference,
)
from erniekit.kernels.selection import force
from erniekit.kernels.stored import Stored, kind_of

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]

ONE_PRODUCT = 0.06  # 3.7 % is what rounding both sides to 4 bits makes
SEVERAL = 0.12  # of what passes three or four such products, or is left when most of it cancels


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().float() - b.detach().float()).norm() / b.detach().float().norm())


def without_waiting(call: Callable[[], Any]) -> Any:
    call()  # libraries are set up, kernels are built
    torch.cuda.set_sync_debug_mode("error")
    try:
        return call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("width", [37, 1536, 2560, 3072, 12288])
def test_rows_are_rounded_as_defined(width: int) -> None:
    torch.manual_seed(0)
    x = normal(257, width) * torch.logspace(-9, 9, 257, device="cuda").bfloat16()[:, None]
    x[5] = 0
    (got, scale), (want, right) = without_waiting(lambda: quantised(x)), reference(x)
    assert torch.allclose(scale, right, rtol=1e-6, atol=0)
    steps = (got.view(torch.int8).int() - want.view(torch.int8).int()).abs()
    assert int(steps.max()) <= 1, "a quotient on the edge between two numbers may fall to either"
    assert float((steps > 0).float().mean()) < 0.02  # of bf16 numbers, one row in seven has many such quotients
    halves = normal(8, 2 * width)[:, width:]  # rows that lie apart
    assert torch.equal(quantised(halves)[0].float(), quantised(halves.contiguous())[0].float())


def test_what_is_not_finite_stays_so_and_zeros_stay_zeros() -> None:
    x = torch.zeros(4, 64, device="cuda", dtype=torch.bfloat16)
    x[1, 3], x[2, 3], x[3, 3] = float("nan"), float("inf"), 1.0
    out = fp8.product(*quantised(x), *quantised(torch.ones(64, 64, device="cuda")))
    assert not out[0].any()
    assert not out[1:3].isfinite().any()
    assert torch.equal(out[3], torch.ones_like(out[3]))
    assert fp8.product(*quantised(x[:0]), *quantised(torch.ones(64, 64, device="cuda"))).shape == (0, 64)


def test_factors_of_experts_go_into_rows_and_matrices_are_transposed() -> None:
    torch.manual_seed(0)
    order, _ = routed(517, 12)
    x, factor = normal(517, H), torch.rand(12, H, device="cuda") * 1e-3
    for given in ((normal(517 * K, H), factor, order.ends), (x, factor, order.ends, order.row_of, K)):
        (got, scale), (want, right) = (
            without_waiting(lambda g=given: quantised_by_expert(*g)),
            by_expert_reference(*given),
        )
        assert torch.allclose(scale, right, rtol=1e-5, atol=0)
        assert apart(dequantised(got, scale), dequantised(want, right)) < 0.01
    (got, scale), (want, right) = quantised_with(x, factor[0]), reference(x.float() * factor[0])
    assert apart(dequantised(got, scale), dequantised(want, right)) < 0.01
    image = torch.randint(0, 256, (3, 136, 272), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    assert torch.equal(fp8.transposed(image).view(torch.uint8), image.view(torch.uint8).transpose(1, 2))


def product_errors() -> dict[str, float]:
    torch.manual_seed(0)
    x, weight = normal(1000, H), normal(3584, H, std=0.02)
    (x8, xs), (w8, ws) = quantised(x), quantised(weight)
    got = without_waiting(lambda: fp8.product(x8, xs, w8, ws))
    errors = {
        "to exact": apart(got, x.float() @ weight.float().t()),
        "to definition": apart(got, dequantised(x8, xs) @ dequantised(w8, ws).t()),
    }
    assert errors["to exact"] < ONE_PRODUCT, errors
    assert errors["to definition"] < 0.01, errors  # the card sums in less than fp32 (fast accumulation), then bf16
    return errors


def grouped_errors() -> dict[str, float]:
    torch.manual_seed(0)
    order, _ = routed(517, 12)
    rows, weight = normal(517 * K, H), normal(12, 2 * W, H, std=0.02)
    held = packed(weight)
    r8, rs = quantised(rows)
    got = without_waiting(lambda: fp8.grouped(r8, rs, held.data, held.scale, order.ends))
    bounds = [0, *order.ends.tolist()]
    spans = list(enumerate(pairwise(bounds)))
    exact = torch.cat([rows[a:b].float() @ weight[e].float().t() for e, (a, b) in spans])
    w32 = dequantised(held.data, held.scale)
    rounded = torch.cat([dequantised(r8[a:b], rs[a:b]) @ w32[e].t() for e, (a, b) in spans])
    back = without_waiting(lambda: kind_of(held).turned_grouped(got, held, order.ends, got.dtype))
    same_back = torch.cat([got[a:b].float() @ w32[e] for e, (a, b) in spans])  # by what forward multiplied by
    errors = {
        "to exact": apart(got, exact), "to definition": apart(got, rounded), "of the gradient": apart(back, same_back)
    }  # fmt: skip
    assert errors["to exact"] < ONE_PRODUCT, errors
    assert errors["of the gradient"] < ONE_PRODUCT, errors
    assert errors["to definition"] < 0.01, errors
    return errors


def test_a_product_is_that_of_its_rounded_numbers() -> None:
    product_errors()


def test_a_grouped_product_is_that_of_its_rounded_numbers_both_ways() -> None:
    grouped_errors()


def block_errors() -> dict[str, float]:
    x, order, weights, gate_up, down, updates = block()
    names = ("x", "weights", "gate A", "gate B", "up A", "up B", "down A", "down B")
    leaves = [x, weights, *(t for u in updates for t in u[:2])]
    upstream = normal(*x.shape)

    def run(*base: Any) -> list[torch.Tensor]:
        y = expert_mlp(x, order, weights, *base, *updates)
        return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]

    want = run(gate_up, down)
    held = packed(gate_up), packed(down)
    got = without_waiting(lambda: run(*held))
    errors = {name: apart(a, b) for name, a, b in zip(("y", *names), got, want)}
    half = run(held[0], down)  # adapters on gate and up alone leave down as it was
    errors["y, gate_up alone"] = apart(half[0], want[0])
    assert all(0.01 < error < SEVERAL for error in errors.values()), errors
    return errors


def linear_errors() -> dict[str, float]:
    torch.manual_seed(0)
    x, weight = normal(2, 1024, H, grad=True), normal(3584, H, std=0.02)
    spans = ((0, 2560), (2560, 3072), (3072, 3584))
    updates = [
        RowUpdate(normal(RANK, H, std=0.02, grad=True), normal(b - a, RANK, std=0.02, grad=True), 2.0, ((a, b),))
        for a, b in spans
    ]
    leaves, upstream = [x, *(t for u in updates for t in u[:2])], normal(2, 1024, 3584)

    def run(base: Any) -> list[torch.Tensor]:
        y = lora_linear(x, base if isinstance(base, Stored) else Stored(base), None, updates)
        return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]

    want, held = run(weight), packed(weight)
    got = without_waiting(lambda: run(held))
    names = ("y", "x", *(f"{part} {side}" for part in "qkv" for side in "AB"))
    errors = {name: apart(a, b) for name, a, b in zip(names, got, want)}
    assert max(errors["y"], errors["x"]) < ONE_PRODUCT, errors
    exact = [error for name, error in errors.items() if name not in ("y", "x")]
    assert max(exact) < 1e-3, errors  # adapters' gradients are of the given x and dy: nothing of them is rounded to fp8
    return errors


@pytest.mark.parametrize("ranks", [(), (RANK,), (RANK, 8)])
@pytest.mark.parametrize("rows", [0, 5, 4096])
def test_products_in_triton_with_updates_in_them_are_torchs(rows: int, ranks: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    order, _ = routed(rows)
    x8, xs = quantised(normal(rows * K, H))
    image, scale = (each.unflatten(0, (64, W)) for each in quantised(normal(64 * W, H, std=0.02)))
    tails = [(normal(rows * K, n), normal(64, n, W, std=0.02)) for n in ranks]
    force({"experts' fp8 products": "torch"})
    try:
        want = fp8.grouped(x8, xs, image, scale, order.ends).float()
    finally:
        force({})
    want = expert_reference.add_low(want, [(z.float(), by.float()) for z, by in tails], 2.0, order.ends)
    for by in (scale, None):
        got = without_waiting(lambda by=by: fp8.grouped_plus(x8, xs, image, by, order.ends, tails, 2.0))
        if not rows:
            assert got is None
        elif by is not None:
            assert apart(got, want) < 0.005
        else:
            plain = fp8.grouped(x8, xs, image, None, order.ends)
            ones = fp8.product(
                x8[:1], xs[:1], image[int((order.ends > 0).nonzero()[0])], torch.ones(W, 1, device="cuda")
            )
            assert apart(plain[:1], ones) < 0.005


def test_the_expert_block_and_its_adapters_gradients_stay_near_bf16s() -> None:
    block_errors()


def test_a_linear_with_adapters_and_their_gradients_stay_near_bf16s() -> None:
    linear_errors()


def test_the_block_compiles_whole_with_an_fp8_base() -> None:
    x, order, weights, gate_up, down, updates = block(256)
    held, leaves = (packed(gate_up), packed(down)), [x, *(t for u in updates for t in u[:2])]

    def run(x: torch.Tensor) -> torch.Tensor:
        return x + expert_mlp(x, order, weights, *held, *updates)

    upstream, results = normal(*x.shape), []
    for call in (run, torch.compile(run, fullgraph=True)):
        y = call(x)
        results.append([y, *torch.autograd.grad(y, leaves, upstream)])
    assert all(apart(a, b) < 0.01 for a, b in zip(*results))  # x + y is rounded once more in one of them
