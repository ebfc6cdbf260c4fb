"""The expert block on an NVIDIA card: right in 16 bit, for any rank, and without ever waiting for the device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from erniekit.kernels import expert_mlp as op
from erniekit.kernels import expert_reference
from erniekit.kernels.expert_mlp import Update, expert_mlp
from erniekit.kernels.moe_permute import by_expert
from erniekit.kernels.stored import Stored

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]


def by_definition(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, updates: list
) -> torch.Tensor:
    """Expert by expert in the inputs' dtype, updates put into the weights."""
    gate, up, of_down = ((u.scale * u.B @ u.A) if u else None for u in updates)
    y = torch.zeros_like(x)
    for e in range(gate_up.shape[0]):
        chosen = (ids == e).nonzero()
        a, b = gate_up[e].chunk(2)
        a, b = (a if gate is None else a + gate[e]), (b if up is None else b + up[e])
        last = down[e] if of_down is None else down[e] + of_down[e]
        mine = x[chosen[:, 0]]
        answer = (F.silu(mine @ a.t()) * (mine @ b.t())) @ last.t()
        y = y.index_add(0, chosen[:, 0], answer * weights[chosen[:, 0], chosen[:, 1], None])
    return y


def case(tokens: int, experts: int, hidden: int, width: int, ranks: tuple[int, int, int], trained: bool) -> tuple:
    generator = torch.Generator("cuda").manual_seed(0)

    def made(*shape: int, std: float, grad: bool = True) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda", generator=generator) * std).bfloat16().requires_grad_(grad)

    scores = torch.rand(tokens, experts, device="cuda", generator=generator) + torch.arange(experts, device="cuda") / 70
    scores[:, 3] = -1  # nobody's choice
    weights, ids = scores.softmax(-1).topk(6)
    x, w = made(tokens, hidden, std=1.0), (weights * 6).bfloat16().requires_grad_()
    base = (
        made(experts, 2 * width, hidden, std=0.03, grad=trained),
        made(experts, hidden, width, std=0.03, grad=trained),
    )
    shapes = ((hidden, width), (hidden, width), (width, hidden))
    updates = [
        Update(made(experts, r, i, std=0.03), made(experts, o, r, std=0.1), 2.0) if r else None
        for r, (i, o) in zip(ranks, shapes)
    ]
    return x, ids, w, *base, updates


CASES = {
    "rank 32": (2048, 64, 2560, 1536, (32, 32, 32), False),
    "odd ranks": (301, 9, 136, 72, (3, 17, 5), False),
    "high ranks": (517, 12, 512, 256, (64, 33, 128), False),
    "up alone": (130, 9, 128, 64, (0, 8, 0), False),
    "trained, no LoRA": (517, 12, 512, 256, (0, 0, 0), True),
    "one token": (1, 8, 64, 64, (8, 8, 8), False),
    "above what the kernels hold": (301, 9, 136, 72, (160, 131, 200), False),
    "odd widths": (301, 9, 100, 36, (3, 17, 5), True),
}


@pytest.mark.parametrize("name", CASES)
def test_the_block_and_all_its_gradients_are_fp32s_to_rounding(name: str) -> None:
    block_errors(name)


def without_waiting(call):  # type: ignore[no-untyped-def]
    call()  # libraries are set up, kernels are built
    torch.cuda.set_sync_debug_mode("error")
    try:
        return call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("cut", [False, True])
def test_choices_without_a_row_and_rows_that_travelled_are_as_in_plain_torch(cut: bool, monkeypatch) -> None:
    """What expert parallelism and a capacity ask of the op, against its plain-torch definition on the same card."""
    x, ids, w, gate_up, down, updates = case(301, 9, 136, 72, (8, 8, 8), False)
    ids[torch.rand(ids.shape, device="cuda") < 0.4] = 9
    order, base = by_expert(ids, 9), (Stored(gate_up), Stored(down))
    if cut:
        order = order._replace(row_of=order.row_of[: int(order.ends[-1])])
    rows, arrived = x.detach()[:200].clone().requires_grad_(), by_expert(ids[:200, :1].clamp(max=8), 9)
    leaves, upstream = [t for u in updates for t in u[:2]], torch.randn_like(x)

    def run() -> list[torch.Tensor]:
        y, z = expert_mlp(x, order, w, *base, *updates), expert_mlp(rows, arrived, None, *base, *updates)
        return [y, z, *torch.autograd.grad((y, z), [x, w, rows, *leaves], (upstream, upstream[:200]))]

    got = run()
    monkeypatch.setattr(op, "_triton_steps", lambda: expert_reference)
    for mine, right in zip(got, run()):
        assert (mine - right).norm() <= 0.02 * right.norm()
    assert not got[3][ids == 9].any(), "no gradient of a choice without a row"


def block_errors(name: str) -> dict[str, float]:
    x, ids, w, gate_up, down, updates = case(*CASES[name])
    leaves = {"x": x, "weights": w, "gate_up": gate_up, "down": down}
    for part, update in zip(("gate", "up", "down"), updates):
        if update:
            leaves |= {f"{part} A": update.A, f"{part} B": update.B}
    asked = {key: t for key, t in leaves.items() if t.requires_grad}
    upstream = torch.randn_like(x)
    order = by_expert(ids, gate_up.shape[0])
    y = without_waiting(lambda: expert_mlp(x, order, w, Stored(gate_up), Stored(down), *updates))
    got = [y, *torch.autograd.grad(y, list(asked.values()), upstream)]
    exact = {key: t.detach().float().requires_grad_(t.requires_grad) for key, t in leaves.items()}
    ups = [
        Update(exact[f"{part} A"], exact[f"{part} B"], u.scale) if u else None
        for part, u in zip(("gate", "up", "down"), updates)
    ]
    want_y = by_definition(exact["x"], ids, exact["weights"], exact["gate_up"], exact["down"], ups)
    want = [want_y, *torch.autograd.grad(want_y, [exact[key] for key in asked], upstream.float())]
    errors = {}
    for key, mine, right in zip(("y", *asked), got, want):
        right = right.detach()
        errors[key] = float((mine.detach().float() - right).norm() / right.norm().clamp(min=1e-20))
    # bf16 keeps 8 bits (0.0017 for one rounding); gradients pass four roundings, weights' ones cancel in part
    assert all(error < 0.02 for error in errors.values()), errors
    return errors


@pytest.mark.parametrize("rank", [32, 64, 128])
def test_every_kernel_of_the_block_gives_the_same_bits_each_time(rank: int) -> None:
    """A tile that is overwritten while it is read shows as a row that differs now and then; no kernel adds up in an
    order of its own."""
    tokens, experts, hidden, width, k = 8192, 64, 2560, 1536, 6
    steps = op._triton_steps()
    x, ids, w, *_, (gate, up, down) = case(tokens, experts, hidden, width, (rank,) * 3, False)
    order, flat = by_expert(ids, experts), w.detach().reshape(-1)
    ends, row_of = order.ends, order.row_of
    wide = {n: torch.randn(tokens * k, n, device="cuda").bfloat16() for n in (width, 2 * width, hidden)}
    z, low = (torch.randn(tokens * k, n, device="cuda").bfloat16() for n in (2 * rank, rank))
    lows = [(update.B.detach().transpose(1, 2), 2.0) for update in (gate, up)]
    below, tails = (down.A.detach(), 1.0), [(low, down.B.detach().transpose(1, 2))]
    of_middle = [(z[:, :rank], gate.A.detach()), (z[:, rank:], up.A.detach())]
    calls = {
        "take": lambda: steps.take(x.detach(), row_of, k, ends, [(u.A.detach(), 1.0) for u in (gate, up)]),
        "activate": lambda: steps.activate(wide[2 * width], z, *lows, below, flat, row_of, ends),
        "activate_backward": lambda: steps.activate_backward(
            wide[width], low, wide[2 * width], z, *lows, below, flat, row_of, ends
        ),
        "outer": lambda: steps.outer(wide[hidden], [(low, 2.0)], ends, turned=True),
        "outer of tokens": lambda: steps.outer(x.detach(), [(z[:, :rank], 1.0), (z[:, rank:], 1.0)], ends, row_of, k),
        "outer of halves": lambda: steps.outer_of_halves(wide[2 * width], z, rank, (2.0, 2.0), ends),
        "add_low": lambda: [steps.add_low(wide[hidden].clone(), tails, 2.0, ends)],
        "add_low of two": lambda: [steps.add_low(wide[hidden].clone(), of_middle, 1.0, ends)],
    }
    for name, call in calls.items():
        first = call()
        different = sum(int((a != b).sum()) for _ in range(40) for a, b in zip(first, call()))
        assert different == 0, f"{name}: {different} numbers differ in 40 runs"


def test_the_block_compiles_whole_and_nothing_waits_for_the_device() -> None:
    x, ids, w, gate_up, down, updates = case(512, 16, 256, 128, (8, 8, 8), False)

    def run(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
        three = [Update(a, b, 2.0) for a, b in zip(factors[::2], factors[1::2])]
        return x + expert_mlp(x, by_expert(ids, 16), w, Stored(gate_up), Stored(down), *three)

    factors = [t for u in updates for t in u[:2]]
    compiled, upstream = torch.compile(run, fullgraph=True), torch.randn_like(x)
    results = []
    for call in (run, compiled):
        torch.autograd.grad(call(x, ids, w, *factors), [x, w, *factors], upstream)
        torch.cuda.set_sync_debug_mode("error")
        try:
            y = call(x, ids, w, *factors)
            results.append([y, *torch.autograd.grad(y, [x, w, *factors], upstream)])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(*results):
        assert (a - b).norm() <= 0.01 * b.norm()  # x + y is rounded once more in one of them


def test_router_logits_of_16_bit_tokens_have_fp32s_precision() -> None:
    from erniekit.kernels.router_logits import router_logits

    torch.manual_seed(0)
    x = torch.randn(1000, 2560, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(64, 2560, device="cuda") * 0.02).requires_grad_()
    upstream = torch.randn(1000, 64, device="cuda")
    got = router_logits(x, weight)
    got = [got, *torch.autograd.grad(got, (x, weight), upstream)]
    a, b = (t.detach().double().requires_grad_() for t in (x, weight))
    want = a @ b.t()
    want = [want, *torch.autograd.grad(want, (a, b), upstream.double())]
    bounds = (5e-6, 2.5e-3, 5e-6)  # fp32 sums of 2560 products; x's gradient is rounded to bf16 once; fp32 sums
    errors = [float((p.double() - q).detach().norm() / q.detach().norm()) for p, q in zip(got, want)]
    assert all(error <= bound for error, bound in zip(errors, bounds)), errors
