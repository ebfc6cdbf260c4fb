"""The expert block in one op against the path made of its pieces: values, gradients, what it keeps, how it compiles.

In fp32 with the torch twins of its kernels; test_expert_kernels.py has the kernels themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from erniekit.kernels.expert_mlp import ARGUMENTS, Update, expert_mlp_of_groups, in_triton
from erniekit.kernels.expert_mlp import expert_mlp as op
from erniekit.kernels.grouped_gemm import product_reference
from erniekit.kernels.moe_permute import (
    Order,
    by_expert,
    by_expert_and_group,
    combine,
    gather,
    weights_of_rows,
)
from erniekit.kernels.stored import Stored

SHAPES = [(13, 3, 5, 8, 6), (1, 2, 4, 5, 3), (40, 2, 3, 6, 7)]  # tokens, choices, experts, hidden, width
RANKS = {
    "all": (3, 2, 4),
    "gate_alone": (1, 0, 0),
    "up_and_down": (0, 5, 3),
    "none": (0, 0, 0),
}


def made(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_(grad)


def choices(tokens: int, k: int, experts: int) -> Order:
    """Nobody goes to the last expert."""
    return by_expert(torch.rand(tokens, experts - 1).topk(k).indices, experts)


def updates_of(ranks: Sequence[int], experts: int, hidden: int, width: int) -> list[Update | None]:
    shapes = ((hidden, width), (hidden, width), (width, hidden))
    return [
        Update(made(experts, r, i), made(experts, o, r), 1.5 - 0.25 * r) if r else None
        for r, (i, o) in zip(ranks, shapes)
    ]


def expert_mlp(x, order, weights, gate_up, down, *updates):  # type: ignore[no-untyped-def]
    return op(x, order, weights, Stored(gate_up), Stored(down), *updates)


def reference(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return product_reference(rows, weight.transpose(1, 2), ends)


def by_pieces(x, order, weights, gate_up, down, *updates):  # type: ignore[no-untyped-def]
    gate, up, last = (0 if u is None else u.scale * u.B @ u.A for u in updates)
    first, second = gate_up.chunk(2, dim=1)
    rows = reference(gather(x, order, weights.shape[1]), torch.cat([first + gate, second + up], 1), order.ends)
    a, b = rows.chunk(2, dim=-1)
    answers = reference(F.silu(a) * b, down + last, order.ends)
    return combine(answers * weights_of_rows(weights, order), order, weights.shape[1])


def leaves(*tensors: torch.Tensor, updates: Sequence[Update | None]) -> list[torch.Tensor]:
    return [t for t in (*tensors, *(t for u in updates if u for t in u[:2])) if t.requires_grad]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("trained", [False, True])
def test_answers_and_all_gradients_are_those_of_the_pieces(shape: tuple[int, ...], ranks: str, trained: bool) -> None:
    torch.manual_seed(0)
    tokens, k, experts, hidden, width = shape
    x, weights, order = made(tokens, hidden), torch.rand(tokens, k, requires_grad=True), choices(tokens, k, experts)
    base = made(experts, 2 * width, hidden, grad=trained), made(experts, hidden, width, grad=trained)
    updates = updates_of(RANKS[ranks], experts, hidden, width)
    inputs, upstream = leaves(x, weights, *base, updates=updates), torch.randn(tokens, hidden)
    got, want = (f(x, order, weights, *base, *updates) for f in (expert_mlp, by_pieces))
    # the same sums of fp32 in another order, answers around 30
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    got, want = (torch.autograd.grad(y, inputs, upstream) for y in (got, want))
    torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-4)


def test_gradients_are_formed_only_for_what_is_trained() -> None:
    torch.manual_seed(0)
    order, base = choices(9, 2, 4), (made(4, 6, 5, grad=False), made(4, 5, 3, grad=False))
    x, weights = made(9, 5, grad=False), torch.rand(9, 2)
    updates = updates_of((2, 0, 2), 4, 5, 3)
    updates[0] = Update(updates[0].A.requires_grad_(False), updates[0].B, 2.0)
    expert_mlp(x, order, weights, *base, *updates).sum().backward()
    trained = [updates[0].B, updates[2].A, updates[2].B]
    assert all(t.grad is not None and t.grad.any() for t in trained)
    assert all(t.grad is None for t in (x, weights, *base, updates[0].A))


def test_two_parts_may_share_an_a() -> None:
    torch.manual_seed(0)
    order, base, x, weights = choices(9, 2, 4), (made(4, 6, 5), made(4, 5, 3)), made(9, 5), torch.rand(9, 2)
    A, B = made(4, 2, 5), made(4, 6, 2)
    updates = [Update(A, B[:, :3], 2.0), Update(A, B[:, 3:], 2.0), None]
    got, want = (
        torch.autograd.grad(f(x, order, weights, *base, *updates).square().sum(), (x, A, B))
        for f in (expert_mlp, by_pieces)
    )
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-4)  # gradients around 1e4


def test_what_is_kept_for_backward_is_the_tokens_gate_up_and_the_low_ranks() -> None:
    """Rows of tokens, activations and answers are not: at 8K tokens they are three quarters of what could be."""
    torch.manual_seed(0)
    order, updates = choices(30, 3, 6), updates_of((2, 2, 2), 6, 16, 8)
    x, weights = made(30, 16), torch.rand(30, 3, requires_grad=True)
    base = made(6, 16, 16, grad=False), made(6, 16, 8, grad=False)
    kept: dict[int, torch.Tensor] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        expert_mlp(x, order, weights, *base, *updates)
    given = [x, weights, *order, *base, *(t for u in updates if u for t in u[:2])]
    new = [tuple(t.shape) for at, t in kept.items() if at not in {g.untyped_storage().data_ptr() for g in given}]
    assert sorted(new) == [(90, 2), (90, 4), (90, 16)]


@pytest.mark.parametrize("ranks", [(2, 0, 2), (2, 3, 2)])
def test_the_block_compiles_whole_with_the_same_gradients(ranks: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    order, updates = choices(9, 2, 4), updates_of(ranks, 4, 5, 3)
    x, weights, base = (
        made(9, 5),
        torch.rand(9, 2, requires_grad=True),
        (made(4, 6, 5, grad=False), made(4, 5, 3, grad=False)),
    )
    factors = [t for u in updates if u for t in u[:2]]

    def run(x: torch.Tensor, weights: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
        pairs = iter(zip(factors[::2], factors[1::2]))
        three = [Update(*next(pairs), 1.0 + i) if rank else None for i, rank in enumerate(ranks)]
        return x + expert_mlp(x, order, weights, *base, *three)

    inputs = [x, weights, *factors]
    plain, whole = run(*inputs), torch.compile(run, fullgraph=True, backend="aot_eager")(*inputs)
    assert torch.equal(plain, whole)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), inputs) for y in (plain, whole))):
        assert torch.equal(a, b)


@pytest.mark.parametrize("ranks", RANKS)
def test_what_the_op_says_of_itself_holds(ranks: str) -> None:
    """Its schema, the shapes it promises a compiler, and that it is differentiable."""
    torch.manual_seed(0)
    order, base = choices(9, 2, 4), (made(4, 6, 5), made(4, 5, 3))
    updates = updates_of(RANKS[ranks], 4, 5, 3)
    names = [f"{part}_{side}" for part in ("gate", "up", "down") for side in "ab"]
    factors = dict(zip(names, (t for u in updates for t in (u[:2] if u else (None, None)))))
    given = {"x": made(9, 5), **order._asdict(), "weights": torch.rand(9, 2, requires_grad=True), **factors}
    held = {"gate_up": Stored(base[0]), "down": Stored(base[1]), "scales": [1.0, 2.0, 0.5]}
    torch.library.opcheck(torch.ops.erniekit.expert_mlp.default, ARGUMENTS.flat({**given, **held}))


def test_the_kernels_are_asked_only_for_what_they_take() -> None:
    x = torch.zeros(4, 16)
    assert not in_triton(x, 4, 8, [None])
    assert not in_triton(x.bfloat16(), 4, 8, [None])  # not on a card


@pytest.mark.parametrize("cut", [False, True])
def test_choices_without_a_row_add_nothing_and_learn_nothing(cut: bool) -> None:
    """Their experts are on another rank, or the capacity was reached. cut: rows of no expert are not even there."""
    torch.manual_seed(0)
    tokens, k, experts, hidden, width = 13, 3, 5, 8, 6
    ids = torch.rand(tokens, experts).topk(k).indices
    ids[torch.rand(tokens, k) < 0.4] = experts
    ids[4] = experts  # a token without any
    order = by_expert(ids, experts)
    known = int(order.ends[-1])
    assert 0 < known < tokens * k - k
    x, weights = made(tokens, hidden), torch.rand(tokens, k, requires_grad=True)
    base, updates = (made(experts, 2 * width, hidden), made(experts, hidden, width)), updates_of((2, 2, 2), 5, 8, 6)
    given = order._replace(row_of=order.row_of[:known]) if cut else order
    inputs, upstream = leaves(x, weights, *base, updates=updates), torch.randn(tokens, hidden)
    got = expert_mlp(x, given, weights, *base, *updates)
    want = by_pieces(x, order, weights * (ids < experts), *base, *updates)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert not got[4].any()
    got, want = (torch.autograd.grad(y, inputs, upstream) for y in (got, want))
    torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-4)
    assert not got[1][ids == experts].any()


@pytest.mark.parametrize("rows", [17, 0])
def test_rows_that_have_travelled_are_put_in_order_and_back_without_a_weight(rows: int) -> None:
    torch.manual_seed(0)
    order = by_expert(torch.randint(0, 4, (rows, 1)), 4)
    x, base, updates = made(rows, 8), (made(4, 12, 8), made(4, 8, 6)), updates_of((2, 0, 3), 4, 8, 6)
    inputs, upstream = leaves(x, *base, updates=updates), torch.randn(rows, 8)
    got = expert_mlp(x, order, None, *base, *updates)
    want = by_pieces(x, order, torch.ones(rows, 1), *base, *updates)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    got, want = (torch.autograd.grad(y, inputs, upstream) for y in (got, want))
    torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_groups_of_an_experts_rows_have_updates_of_their_own(ranks: tuple[int, int, int]) -> None:
    tokens, k, experts, hidden, width, groups = 13, 3, 5, 8, 6, 4
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, k)
    gate_up, down = torch.randn(experts, 2 * width, hidden), torch.randn(experts, hidden, width)
    updates = updates_of(ranks, experts * groups, hidden, width)
    ids = torch.rand(tokens, experts - 1).topk(k).indices  # nobody goes to the last expert
    group = torch.randint(0, groups - 1, (tokens,))  # nor is anybody of the last group
    order, ends = by_expert_and_group(ids, group, experts, groups)
    assert torch.equal(order.ends, by_expert(ids, experts).ends)
    found = expert_mlp_of_groups(x, order, ends, weights, Stored(gate_up), Stored(down), *updates)
    for number in range(groups):
        own = [u and Update(u.A[number::groups], u.B[number::groups], u.scale) for u in updates]
        alone = expert_mlp(x, by_expert(ids, experts), weights, gate_up, down, *own)
        mine = group == number
        torch.testing.assert_close(found[mine], alone[mine], atol=1e-5, rtol=1e-5)


def test_more_groups_than_can_be_sorted_are_refused() -> None:
    with pytest.raises(ValueError, match="300 experts times 200 groups"):
        by_expert_and_group(torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, dtype=torch.long), 300, 200)
