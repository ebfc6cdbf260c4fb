"""One job on two vendors: a pipeline across, an uneven cut, a tiny MoE with adapters, in float64 beside one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from erniekit.data.collate import collate, one_document
from erniekit.data.types import IGNORE, Batch
from erniekit.lora.inject import inject
from erniekit.lora.settings import LoRASettings
from erniekit.losses.causal import causal_loss
from erniekit.parallel import boundary
from erniekit.parallel.apply import SpreadOptions, parallelise, plain, sharding_of
from erniekit.parallel.islands import Islands
from erniekit.parallel.mesh import Layout, World
from parity.test_expert_layouts import SPEC, config
from parity.test_layouts import LENGTH, packs, whole_value
from support import second_toy, toy_device
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

STEPS, RATE, LAYERS = 3, 0.05, 4


def train(axes: dict[str, Any], wires: tuple[str, ...], lora: bool) -> tuple[list[float], list[float], Any, list[str]]:
    """Losses, norms, every weight this rank owns, and what went through the host (by peer). Plain gradient descent: the
    optimiser's own states are fp32."""
    layout = Layout(**axes)
    rank = torch.distributed.get_rank() if layout.size > 1 else 0
    islands = Islands(wires, ("gloo",) * len(wires)) if len(set(wires)) > 1 else None
    world = World(layout, rank, islands=islands)
    device = (second_toy if wires[rank] == "second" else toy_device).make()
    with torch.device("meta"):
        model = SPEC.build(config(layers=LAYERS))
        if lora:
            inject(model, LoRASettings.resolve(rank=3), seed=0)
    model.to(torch.float64)
    sharding = sharding_of(model, SPEC.plan, layout)

    def fill(name: str, piece: torch.Tensor) -> None:
        whole = whole_value(name, sharding.shape(name))
        for box in sharding.boxes(name, rank):
            piece[box.local_slices] = whole[box.global_slices]

    told: list[float] = []

    def loss(model: Any, batch: Batch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """In float64, as ours is fp32, and noted: an engine adds losses up in fp32. Logits of a cut head have no
        gradient, so there it is ours."""
        if layout.tp > 1:
            total = causal_loss(model, batch, hidden)
            told.append(float(total.detach()))
            return total
        x = batch.input_ids if hidden is None else hidden
        logits = model(x, batch.positions, batch.documents(), batch.max_doc, more=batch.more()).double()
        total = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="sum")
        told.append(float(total.detach()))
        return total

    engine = parallelise(
        model, sharding, world, device, torch.float64, loss, fill, one_document, SpreadOptions()
    )  # fmt: skip
    staged = watched(engine)
    named = {plain(n): p for part in engine.parts for n, p in part.named_parameters() if p.requires_grad}
    losses, norms = [], []
    for step in range(STEPS):
        rows = packs(step)[layout.data_rank(rank) :: layout.data_ranks]
        batches = [collate([pack], pad_to=LENGTH) for pack in rows]
        (weight,) = engine.totals(sum(b.weight for b in batches))
        told.clear()
        engine.forward_backward(batches, [weight] * len(batches))
        losses.append(sum(world.gather(sum(told))) / weight / layout.tp)
        grads = {name: p.grad for name, p in named.items()}
        if engine.sync is not None:
            engine.sync.reduce(grads)
            norms.append(float(engine.sync.norm(grads)))
        else:
            norms.append(float(torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt().float()))
        with torch.no_grad():
            for p in named.values():
                p -= RATE * p.grad
                p.grad = None
    owned = {}
    for name, p in named.items():
        for box in dict(sharding.holders(name)).get(rank, ()):
            owned.setdefault(name, []).append((box.global_slices, p.detach()[box.local_slices].clone()))
    return losses, norms, owned, staged


def watched(engine: Any) -> list[str]:
    """The wire of every peer that something is sent to through the host."""
    seen: list[str] = []
    over = getattr(engine.pipeline, "boundary", None)
    if isinstance(over, boundary.IslandBoundary):
        send = over.host.send

        def noted(tensor: torch.Tensor, rank: int) -> None:
            seen.append(over.wires[rank])
            send(tensor, rank)

        over.host.send = noted  # type: ignore[method-assign]
    return seen


CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "two ranks, cut 3:1": (dict(pp=2, stage_cuts=(3,)), ("toy", "second")),
    "two islands of two stages": (dict(pp=4, stage_cuts=(1, 2, 3)), ("toy", "toy", "second", "second")),
    "two islands of two data ranks, cut 1:3": (dict(pp=2, dp=2, stage_cuts=(1,)), ("toy", "toy", "second", "second")),
    "two islands, tensor parallel inside": (
        dict(pp=2, tp=2, stage_cuts=(3,)), ("toy", "toy", "second", "second")
    ),
}  # fmt: skip
HEAVY = ("two islands, tensor parallel inside", "two islands of two data ranks, cut 1:3")
_alone: dict[bool, Any] = {}


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        *((n, True) if n not in HEAVY else pytest.param(n, True, marks=pytest.mark.full) for n in CASES),
        pytest.param("two ranks, cut 3:1", False, marks=pytest.mark.full),  # a tied embedding on both islands
    ],
)
def test_two_vendors_in_one_job_train_as_one_process_does(name: str, lora: bool, ranks: Ranks) -> None:
    if lora not in _alone:
        _alone[lora] = train({}, ("toy",), lora)
    losses, norms, want, _ = _alone[lora]
    axes, wires = CASES[name]
    close = 1e-6 if "tp" in axes else 1e-9  # a cut product is added up in fp32 by the norm that follows
    answers = ranks.run(len(wires), train, axes, wires, lora)
    found: dict[str, torch.Tensor] = {}
    for rank, (got, lengths, owned, staged) in enumerate(answers):
        assert got == pytest.approx(losses, rel=close)
        assert lengths == pytest.approx(norms, rel=1e-6)  # told in fp32
        assert all(wire != wires[rank] for wire in staged), "within an island nothing goes through the host"
        for piece, boxes in owned.items():
            whole = found.setdefault(piece, torch.full_like(want[piece][0][1], float("nan")))
            for where, value in boxes:
                whole[where] = value
    assert any(staged for *_, staged in answers)
    assert found.keys() == want.keys()
    for piece, boxes in want.items():
        torch.testing.assert_close(
            found[piece], boxes[0][1], rtol=close, atol=close * 1e-2, msg=lambda m, n=piece: f"{n}: {m}"
        )
    start = {n: whole_value(n, tuple(v.shape)) for n, v in found.items()}
    assert not any(torch.equal(found[n], value.double()) for n, value in start.items()), "it must really have trained"
