"""Our runner beside torch's own schedules: the same losses and gradients, of every parameter on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from erniekit.data.collate import one_document
from erniekit.devices import pick
from erniekit.losses.causal import causal_loss
from erniekit.models import MODELS
from erniekit.parallel.apply import SpreadOptions, parallelise
from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from erniekit.parallel.sharding_table import sharding_of
from parity.test_layouts import SHAPE, config, micro_batches, whole_value
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")


def gradients(axes: dict[str, int], schedule: str, runner: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Of two steps of four micro-batches without an update between; one engine makes both."""
    torch.distributed.barrier()
    layout, rank = Layout(**axes), torch.distributed.get_rank()
    spec, world = MODELS.get("llama"), World(layout, rank)
    with torch.device("meta"):
        model = spec.build(config("llama", dict(SHAPE, num_layers=8)))
    sharding = sharding_of(model, spec.plan, layout)

    def fill(name: str, piece: torch.Tensor) -> None:
        whole = whole_value(name, sharding.shape(name))
        for box in sharding.boxes(name, rank):
            piece[box.local_slices] = whole[box.global_slices]

    options = SpreadOptions(schedule=schedule, runner=runner)
    engine = parallelise(
        model, sharding, world, pick("cpu"), torch.float32, causal_loss, fill, one_document, options
    )  # fmt: skip
    losses = []
    for step in range(2):
        batches = micro_batches(step, layout, rank, False)
        shares = [10.0 + k for k in range(len(batches))]
        losses.append(float(engine.sum_losses(engine.forward_backward(batches, shares))))
    named = [(n, p) for part in engine.parts for n, p in part.named_parameters()]
    return losses, {name: p.grad.clone() for name, p in named}


CASES = {
    "1f1b": dict(virtual_stages=1),
    "interleaved": dict(virtual_stages=2),
    "zero_bubble": dict(virtual_stages=2),
    "gpipe": dict(virtual_stages=1),
}


@pytest.mark.parametrize(
    ("schedule", "ranks_used"),
    [
        ("1f1b", 2),
        ("interleaved", 2),
        *(pytest.param(name, 4, marks=pytest.mark.full) for name in ("1f1b", "interleaved")),
        *(pytest.param(name, 2, marks=pytest.mark.full) for name in ("zero_bubble", "gpipe")),
    ],
)
def test_losses_and_gradients_are_those_of_torchs_schedule(schedule: str, ranks_used: int, ranks: Ranks) -> None:
    axes = dict(CASES[schedule], pp=ranks_used)
    ours: list[Any] = ranks.run(ranks_used, gradients, axes, schedule, "erniekit")
    theirs: list[Any] = ranks.run(ranks_used, gradients, axes, schedule, "torch")
    for (losses, grads), (want, oracle) in zip(ours, theirs, strict=True):
        assert losses == pytest.approx(want, abs=1e-6)
        assert losses[0] != losses[1]
        assert grads.keys() == oracle.keys()
        assert len(grads) > 4
        for name, grad in grads.items():
            assert bool(grad.any()), name
            torch.testing.assert_close(grad, oracle[name], atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
