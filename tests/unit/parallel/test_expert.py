"""The ways tokens reach experts on other ranks: answers and every gradient equal those of one rank with all experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from erniekit.models.layers.experts import Experts
from erniekit.models.layers.moe import LocalExchange
from erniekit.models.layers.router import Routing
from erniekit.parallel.expert import AllGatherExchange, AllToAllExchange, OwnExpertsExchange, dispatch_of
from erniekit.parallel.plan import share
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

EXPERTS, CHOICES, HIDDEN, WIDTH = 5, 2, 6, 7


def tokens(rank: int, count: int, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids, weights, and the gradient that comes from above. Of a dropped choice the id is EXPERTS, the weight 0."""
    draw = torch.Generator().manual_seed(100 + rank)
    x, above = torch.randn(count, HIDDEN, generator=draw), torch.randn(count, HIDDEN, generator=draw)
    weights = torch.rand(count, CHOICES, generator=draw)
    order = torch.rand(count, EXPERTS, generator=draw).argsort(-1)
    ids = {"mixed": order[:, :CHOICES], "dropped": order[:, :CHOICES], "one": torch.tensor([[4, 3]]).expand(count, 2)}[
        kind
    ]
    if kind == "dropped":
        gone = torch.rand(count, CHOICES, generator=draw) < 0.4
        ids, weights = torch.where(gone, EXPERTS, ids), weights * ~gone
    return x, ids, weights, above


def experts() -> Experts:
    made = Experts(EXPERTS, HIDDEN, WIDTH)
    with torch.no_grad():
        for k, weight in enumerate(made.parameters()):
            weight.normal_(generator=torch.Generator().manual_seed(k))
    return made


def some_of(whole: Experts, first: int, last: int) -> Experts:
    mine = Experts(last - first, HIDDEN, WIDTH)
    for a, b in zip(mine.parameters(), whole.parameters()):
        each = b.shape[0] // EXPERTS
        a.data.copy_(b.data[first * each : last * each])
    return mine


def answer(exchange: nn.Module, held: Experts, rank: int, count: int, kind: str) -> Any:
    x, ids, weights, above = tokens(rank, count, kind)
    x.requires_grad_()
    weights.requires_grad_()
    nobody = torch.empty(0)
    y = exchange(x, Routing(nobody, nobody, ids, weights), held, EXPERTS)
    y.backward(above)
    return y.detach(), x.grad, weights.grad, [p.grad for p in held.parameters()]


def on_a_rank(dispatch: str, counts: list[int], kind: str) -> Any:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    shares = [share(EXPERTS, len(counts), r) for r in range(len(counts))]
    mine = OwnExpertsExchange(shares[rank])
    exchange = AllToAllExchange(group, shares) if dispatch == "all_to_all" else AllGatherExchange(mine, group, dispatch)
    seen = 0 if dispatch == "copies" else rank
    return answer(exchange, some_of(experts(), *shares[rank]), seen, counts[rank], kind)


CASES = [
    ("all_to_all", [4, 9], "mixed"),
    ("all_to_all", [5, 3, 4], "dropped"),
    ("all_to_all", [0, 6], "mixed"),
    ("all_to_all", [6, 7], "one"),
    ("any", [4, 9], "mixed"),
    ("any", [3, 0, 5], "dropped"),
    ("any", [6, 7], "one"),
    ("slices", [6, 6], "mixed"),
    ("copies", [8, 8], "mixed"),
    ("copies", [8, 8], "one"),
]


@pytest.mark.parametrize(("dispatch", "counts", "kind"), CASES)
def test_answers_and_gradients_are_those_of_one_rank(dispatch: str, counts: list[int], kind: str, ranks: Ranks) -> None:
    """`one` sends every token to experts 4 and 3, which only the last rank has."""
    answers = ranks.run(len(counts), on_a_rank, dispatch, counts, kind)
    whole = experts()
    if dispatch == "copies":
        alone = [answer(LocalExchange(), whole, 0, counts[0], kind)] * len(counts)
    else:
        alone = [answer(LocalExchange(), whole, r, n, kind) for r, n in enumerate(counts)]  # gradients add up in whole
    for got, want in zip(answers, alone):
        for a, b in zip(got[:3], want[:3]):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    for k, param in enumerate(whole.parameters()):
        torch.testing.assert_close(torch.cat([got[3][k] for got in answers]), param.grad, atol=1e-5, rtol=1e-5)


def test_erniekits_key_names_one_of_two_ways() -> None:
    assert [dispatch_of(words) for words in ("", "v2-alltoall-unpad", "v2-alltoall-unpad-text")] == ["all_to_all"] * 3
    assert dispatch_of("v2-unpad") == "all_gather"
