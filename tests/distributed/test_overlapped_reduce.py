"""Gradients of data-parallel ranks that are added up inside the backward pass, over real ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from erniekit.data.collate import collate, one_document
from erniekit.data.types import Pack, Sample
from erniekit.devices import pick
from erniekit.losses.causal import causal_loss
from erniekit.models import MODELS
from erniekit.models.config import DecoderConfig
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.schedule import Schedule
from erniekit.parallel import overlapped_reduce
from erniekit.parallel.apply import SpreadOptions, parallelise
from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from erniekit.parallel.overlapped_reduce import OverlappedReduce
from erniekit.parallel.sharding_table import plain, sharding_of
from erniekit.train.step import TrainStep
from support.ranks import Ranks

SHAPES = {"a": (7, 3), "b": (11,), "c": (2, 2, 5), "d": (), "e": (40,), "f": (1,)}


def sums(seed: int, bucket: int, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """Of gradients that come in an order of each rank's own, some on no rank or on one; and the plain sums."""
    overlapped_reduce.BUCKET = bucket
    rank, size = dist.get_rank(), dist.get_world_size()
    every = [_gradients(seed, each, dtype) for each in range(size)]
    held: dict[str, torch.Tensor] = {}
    params = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    made = OverlappedReduce(params, dist.group.WORLD, held.get, held.__setitem__)  # type: ignore[arg-type]
    order = list(every[rank])
    random.Random(seed + rank).shuffle(order)
    made.ready(order[0])  # of an earlier micro-batch: nothing is sent
    assert not held
    made.begin()
    for name in order:
        held[name] = every[rank][name]
        made.ready(name)
    assert made.finish() == set(SHAPES)
    assert made.finish() == frozenset(), "it was not begun again"
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    want = {name: sum((own[name].float() for own in every if name in own), zeros[name]) for name in SHAPES}
    return held, want, made.sent_early


def _gradients(seed: int, rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(100 * seed + rank)
    found = {name: torch.randint(-99, 99, shape, generator=made).to(dtype) for name, shape in SHAPES.items()}
    return {name: grad for k, (name, grad) in enumerate(found.items()) if (seed + rank + k) % 4}


@pytest.mark.parametrize("bucket", [1, 12, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_right_whatever_order_gradients_come_in_and_whichever_are_missing(
    ranks: Ranks, bucket: int, dtype: torch.dtype
) -> None:
    for seed in range(3):
        for held, want, _ in ranks.run(3, sums, seed, bucket, dtype):
            assert held.keys() == want.keys()
            for name, grad in held.items():
                assert grad.dtype == torch.float32
                assert torch.equal(grad, want[name]), name


CONFIG = DecoderConfig(
    family="ernie4_5", rms_norm_eps=1e-5, rope_theta=1e4, rope_style="pairs", max_positions=64,
    tie_word_embeddings=True, vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=8,
)  # fmt: skip
LENGTH = 16


def idle_on_one(model: Any, batch: Any, *args: Any, **keys: Any) -> torch.Tensor:
    """Rank 1 has a gradient for one parameter only, in the last bucket."""
    if dist.get_rank() == 0:
        return causal_loss(model, batch, *args, **keys)
    return 0.0 * dict(model.named_parameters())["embed.weight"].sum()


def train(early: bool, dtype: str, micro_batches: int, idle: bool = False) -> tuple[list[float], list[int], int]:
    """Losses of a few steps, how many buckets of each were sent inside backward, and of how many."""
    overlapped_reduce.BUCKET = 3000
    world, spec = World(Layout(dp=2), dist.get_rank()), MODELS.get("ernie4_5")
    compute = getattr(torch, dtype)
    with torch.device("meta"):
        model = spec.cast(spec.build(CONFIG), compute)
    sharding = sharding_of(model, spec.plan, world.layout)

    def fill(name: str, piece: torch.Tensor) -> None:
        seed = torch.Generator().manual_seed(sum(map(ord, name)))
        piece.copy_(0.1 * torch.randn(piece.shape, generator=seed) + (1.0 if piece.dim() == 1 else 0.0))

    loss = idle_on_one if idle else causal_loss
    engine = parallelise(model, sharding, world, pick("cpu"), compute, loss, fill, one_document, SpreadOptions())
    named = [(plain(n), p) for n, p in engine.model.named_parameters()]
    optimizer = AdamW(make_groups(named, CONFIG.num_layers, 0.1), (0.9, 0.95), 1e-6)
    step = TrainStep(engine, optimizer, Schedule("constant", 1e-3, 99))
    made = step._early
    assert made is not None
    if not early:
        step._early = None
        engine.last_backward = lambda: None
    losses, sent = [], []
    for number in range(1, 4):
        losses.append(step([_batch(number, k, world.rank) for k in range(micro_batches)], number).loss)
        sent.append(made.sent_early)
    return losses, sent, len(made.buckets)


def _batch(step: int, number: int, rank: int) -> Any:
    made = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    ids = torch.randint(1, 61, (LENGTH + 1,), generator=made).to(torch.int32).numpy()
    return collate([Pack((Sample(ids[:-1], ids[1:]),), number)], pad_to=LENGTH)


@pytest.mark.parametrize(("dtype", "micro_batches"), [("float32", 1), ("float32", 3), ("bfloat16", 1), ("bfloat16", 2)])
def test_a_step_whose_sums_begin_inside_backward_has_the_losses_of_one_that_waits(
    ranks: Ranks, dtype: str, micro_batches: int
) -> None:
    told = ranks.run(2, train, True, dtype, micro_batches)
    waited = ranks.run(2, train, False, dtype, micro_batches)
    losses, sent, buckets = told[0]
    assert losses == waited[0][0] == told[1][0]
    assert losses[0] > losses[-1]
    assert buckets > 3
    assert sent == [buckets] * 3, "backward ends with the last gradient"
    assert waited[0][1] == [0, 0, 0]


def test_a_rank_that_lacks_gradients_sends_them_before_any_other_call(ranks: Ranks) -> None:
    told = ranks.run(2, train, True, "float32", 1, True)
    waited = ranks.run(2, train, False, "float32", 1, True)
    assert told[0][0] == told[1][0] == waited[0][0]
    assert told[0][1] == [told[0][2]] * 3
    assert told[1][1] == [0] * 3, "its first bucket was complete only after the backward pass"
