"""A vocabulary dealt out to ranks: the loss of a batch or of each token, and its gradients, as from one head."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from erniekit.parallel.vocab import VocabHead
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

BATCH, LENGTH, HIDDEN = 2, 8, 12
DEALT = {2: ([7, 6], [13, 0]), 4: ([4, 3, 3, 3], [6, 0, 6, 1])}


def token_losses(sizes: list[int], sequence_parallel: bool, chunk: int, ignored: float, dtype: torch.dtype) -> list:
    """Values and gradients of hidden states, weight and bias: of this rank's head, and of one whole head."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(4)
    rand = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    hidden, weight, bias = rand(BATCH, LENGTH, HIDDEN), rand(sum(sizes), HIDDEN), rand(sum(sizes))
    labels = torch.randint(0, sum(sizes), (BATCH, LENGTH), generator=generator)
    labels[torch.rand(BATCH, LENGTH, generator=generator) < ignored] = -100
    upstream = torch.randn(BATCH, LENGTH, generator=generator)

    vocab = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    place = slice(rank * LENGTH // size, (rank + 1) * LENGTH // size) if sequence_parallel else slice(None)
    mine = [t.clone().requires_grad_() for t in (hidden[:, place], weight[vocab], bias[vocab])]
    head = VocabHead(dist.group.WORLD, sizes, rank, sequence_parallel)
    losses = head.token_losses(mine[0], mine[1], labels, mine[2], -100, chunk)
    losses.backward(upstream)

    whole = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    logits = torch.nn.functional.linear(*whole).float().flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="none")
    expected.backward(upstream.flatten())
    wanted = [expected.view_as(labels), whole[0].grad[:, place], whole[1].grad[vocab], whole[2].grad[vocab]]
    return [(a.detach(), b.detach()) for a, b in zip([losses, *(t.grad for t in mine)], wanted)]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_token_losses_and_gradients_equal_those_of_one_head(ranks: Ranks, count: int, sequence_parallel: bool):
    for sizes in DEALT[count]:
        for chunk, ignored in ((3, 0.4), (100, 0.0)):
            for answer in ranks.run(count, token_losses, sizes, sequence_parallel, chunk, ignored, torch.float32):
                for ours, theirs in answer:
                    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


def test_nothing_to_score_is_zero_on_every_rank(ranks: Ranks):
    for answer in ranks.run(2, token_losses, [7, 6], False, 3, 1.1, torch.float32):
        assert not any(ours.any() for ours, _ in answer)


def exchanges(frozen: bool) -> tuple[int, int, set]:
    """How often the ranks talk in forward and in backward, and the shapes made there."""
    rank, counts, shapes = dist.get_rank(), [0, 0], set()

    class Heard(TorchDispatchMode):
        phase = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            counts[self.phase] += str(func).startswith(("c10d.", "erniekit.sum_over"))
            if isinstance(out, torch.Tensor) and not func.is_view:
                shapes.add(tuple(out.shape))
            return out

    hidden = torch.randn(BATCH, LENGTH, HIDDEN).requires_grad_()
    weight = torch.randn(9, HIDDEN).requires_grad_(not frozen)
    labels = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
    head = VocabHead(dist.group.WORLD, [9, 9], rank, False)
    with Heard() as heard:
        losses = head.token_losses(hidden, weight, labels, None, -100, 4)
        heard.phase = 1
        losses.sum().backward()
    return counts[0], counts[1], shapes


def test_ranks_talk_once_a_chunk_and_a_frozen_head_forms_no_gradient(ranks: Ranks):
    for forward, backward, shapes in ranks.run(2, exchanges, True):
        assert forward == BATCH * LENGTH // 4
        assert backward == 1  # the hidden states' gradient
        assert (9, HIDDEN) not in shapes
        assert (BATCH * LENGTH, 9) not in shapes
    assert all((9, HIDDEN) in shapes for _, _, shapes in ranks.run(2, exchanges, False))


def summed_loss(sizes: list[int], chunk: int, ignored: float, dtype: torch.dtype, divisor: float, early: bool) -> list:
    """The loss and gradients of hidden states, weight and bias, divided early or late: of this rank's head, and of one
    whole head."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(4)
    rand = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    hidden, weight, bias = rand(BATCH, LENGTH, HIDDEN), rand(sum(sizes), HIDDEN), rand(sum(sizes))
    labels = torch.randint(0, sum(sizes), (BATCH, LENGTH), generator=generator)
    labels[torch.rand(BATCH, LENGTH, generator=generator) < ignored] = -100

    vocab = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    mine = [t.clone().requires_grad_() for t in (hidden, weight[vocab], bias[vocab])]
    head = VocabHead(dist.group.WORLD, sizes, rank, False)
    given = (int((labels != -100).sum()), 1 / divisor) if early else ()
    loss = head.loss(mine[0], mine[1], labels, mine[2], -100, chunk, *given)
    loss = loss if early else loss / divisor
    loss.backward()

    whole = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    logits = torch.nn.functional.linear(*whole).float().flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum") / divisor
    expected.backward()
    wanted = [expected, whole[0].grad, whole[1].grad[vocab], whole[2].grad[vocab]]
    return [(a.detach(), b.detach()) for a, b in zip([loss, *(t.grad for t in mine)], wanted)]


def test_the_loss_and_its_gradients_equal_those_of_one_head(ranks: Ranks):
    for sizes, chunk, ignored, early in (([7, 6], 3, 0.4, False), ([13, 0], 100, 0.0, True), ([7, 6], 5, 0.4, True)):
        for answer in ranks.run(2, summed_loss, sizes, chunk, ignored, torch.float32, 30.0, early):
            for ours, theirs in answer:
                torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_in_bf16_one_over_the_tokens_is_not_rounded(ranks: Ranks):
    """1/3000 in bf16 is 0.14 % off, for every number alike; single roundings average out."""
    whole = ranks.run(2, summed_loss, [70, 60], 100, 0.0, torch.bfloat16, 1.0, False)
    for early in (False, True):
        divided = ranks.run(2, summed_loss, [70, 60], 100, 0.0, torch.bfloat16, 3000.0, early)
        for one, other in zip(whole, divided):
            assert abs(float(other[1][0].float().norm() * 3000 / one[1][0].float().norm()) - 1) < 5e-4


def made_without_gradient() -> set:
    rank, shapes = dist.get_rank(), set()

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not func.is_view:
                shapes.add(tuple(out.shape))
            return out

    hidden, weight = torch.randn(BATCH, LENGTH, HIDDEN).requires_grad_(), torch.randn(9, HIDDEN).requires_grad_()
    labels = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
    head = VocabHead(dist.group.WORLD, [9, 9], rank, False)
    with torch.no_grad(), Made():
        head.loss(hidden, weight, labels, None, -100, 4)
        head.token_losses(hidden, weight, labels, None, -100, 4)
    return shapes


def test_evaluation_forms_no_gradient(ranks: Ranks):
    for shapes in ranks.run(2, made_without_gradient):
        assert (4, 9) in shapes
        assert (9, HIDDEN) not in shapes
        assert (BATCH * LENGTH, HIDDEN) not in shapes
