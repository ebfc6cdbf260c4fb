"""A tiny MoE with adapters on the ranks of unlike devices, in float64: an uneven pipeline, plain gradient descent (an
optimiser's own states are fp32). Run in each rank by tests/parity/test_mixed_devices.py and tests/device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from erniekit.data.collate import collate, one_document
from erniekit.data.types import IGNORE, Batch
from erniekit.devices import pick
from erniekit.devices.base import Device
from erniekit.kernels import expert_mlp
from erniekit.lora.inject import inject
from erniekit.lora.settings import LoRASettings
from erniekit.losses.causal import causal_loss
from erniekit.parallel import boundary
from erniekit.parallel.apply import SpreadOptions, parallelise
from erniekit.parallel.islands import Islands
from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from erniekit.parallel.sharding_table import plain, sharding_of
from parity.test_expert_layouts import SPEC, config
from parity.test_layouts import LENGTH, packs, whole_value
from support import second_toy, toy_device

STEPS, RATE, LAYERS = 3, 0.05, 4
Pieces = dict[str, list[tuple[Any, torch.Tensor]]]  # of each weight: which slices of the whole, and their values


# Operators of ours that widen numbers inside.
OPERATORS = {"erniekit::expert_mlp": expert_mlp.forward, "erniekit::expert_mlp_backward": expert_mlp.backward}


class Trained(NamedTuple):
    """By one rank. Everything is on the host."""

    losses: list[float]
    norms: list[float]
    gradients: list[Pieces]  # of every step
    weights: Pieces  # at the end
    staged: list[str]  # the interconnect of each peer that something was sent to through the host
    narrow: list[str]  # operations on floating-point numbers of less than float64


class Narrow(TorchDispatchMode):
    """Notes what is not computed in float64. Single numbers may be fp32: counts and shares of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = OPERATORS.get(func.name())
        if inside is None:
            out = func(*args, **(kwargs or {}))
        else:  # torch calls it with this mode off
            with self:
                out = inside(*args)
        for each in out if isinstance(out, tuple | list) else (out,):
            if not isinstance(each, torch.Tensor) or each.numel() <= 1:
                continue
            if each.is_floating_point() and each.dtype != torch.float64:
                self.seen.append(f"{func} in {each.dtype}")
        return out


def device_of(interconnect: str) -> Device:
    if interconnect in ("toy", "second"):
        return (second_toy if interconnect == "second" else toy_device).make()
    return pick(interconnect)


def train(axes: dict[str, Any], interconnects: tuple[str, ...], lora: bool) -> Trained:
    """interconnects: of each rank, what `device_of` takes."""
    layout = Layout(**axes)
    rank = torch.distributed.get_rank() if layout.size > 1 else 0
    islands = Islands(interconnects, ("gloo",) * len(interconnects)) if len(set(interconnects)) > 1 else None
    world = World(layout, rank, islands=islands)
    device = device_of(interconnects[rank])
    with torch.device("meta"):
        model = SPEC.build(config(layers=LAYERS))
        if lora:
            inject(model, LoRASettings.resolve(rank=3), seed=0)
    model.to(torch.float64)
    sharding = sharding_of(model, SPEC.plan, layout)

    def fill(name: str, piece: torch.Tensor) -> None:
        whole = whole_value(name, sharding.shape(name)).double()
        for box in sharding.boxes(name, rank):
            piece[box.local_slices] = whole[box.global_slices].to(piece.device)

    told: list[float] = []

    def loss(model: Any, batch: Batch, hidden: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        """In float64, as ours is fp32, and noted: an engine adds losses up in fp32. Logits of a cut head have no
        gradient, so there it is ours."""
        if layout.tp > 1:
            total = causal_loss(model, batch, hidden)
        else:
            x = batch.input_ids if hidden is None else hidden
            logits = model(x, batch.positions, batch.documents(), batch.max_doc, more=batch.more())
            total = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="sum")
        told.append(float(total.detach()))
        return total * scale

    engine = parallelise(
        model, sharding, world, device, torch.float64, loss, fill, one_document, SpreadOptions()
    )  # fmt: skip
    staged = watched(engine)
    named = {plain(n): p for part in engine.parts for n, p in part.named_parameters() if p.requires_grad}
    losses, norms, gradients = [], [], []
    with Narrow() as narrow:
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
                norms.append(float(torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()))
            gradients.append(owned(grads, sharding, rank))
            with torch.no_grad():
                for p in named.values():
                    p -= RATE * p.grad
                    p.grad = None
    return Trained(losses, norms, gradients, owned(named, sharding, rank), staged, narrow.seen)


def train_in_rank(*given: Any) -> tuple[Any, ...]:
    """Trained's fields: a rank loads this file under another name, so that its classes are not those of the test."""
    return tuple(train(*given))


def owned(values: dict[str, torch.Tensor], sharding: Any, rank: int) -> Pieces:
    out: Pieces = {}
    for name, value in values.items():
        for box in dict(sharding.holders(name)).get(rank, ()):
            out.setdefault(name, []).append((box.global_slices, value.detach()[box.local_slices].cpu().clone()))
    return out


def watched(engine: Any) -> list[str]:
    """The interconnect of every peer that something is sent to through the host."""
    seen: list[str] = []
    over = getattr(engine.pipeline, "boundary", None)
    if isinstance(over, boundary.IslandBoundary):
        send = over.host.send

        def noted(tensor: torch.Tensor, rank: int) -> None:
            seen.append(over.interconnects[rank])
            send(tensor, rank)

        over.host.send = noted  # type: ignore[method-assign]
    return seen


def whole(pieces: list[Pieces], like: Pieces) -> dict[str, torch.Tensor]:
    """Of the pieces of every rank; not a number where no rank had any. like: one process's, which has all."""
    out = {name: torch.full_like(boxes[0][1], float("nan")) for name, boxes in like.items()}
    for of_rank in pieces:
        for name, boxes in of_rank.items():
            for where, value in boxes:
                out[name][where] = value
    return out


def farthest(pieces: list[Pieces], want: Pieces) -> tuple[float, str]:
    """The largest difference of a tensor's element, relative to the tensor's largest, and the tensor's name."""
    found = whole(pieces, want)
    return max(
        (float((found[name] - boxes[0][1]).abs().max() / boxes[0][1].abs().max().clamp(min=1e-30)), name)
        for name, boxes in want.items()
    )


def check(answers: Sequence[Trained], alone: Trained, interconnects: tuple[str, ...], close: float) -> None:
    """Losses, gradients and weights of the ranks against those of one process."""
    for rank, got in enumerate(answers):
        far = max(abs(a - b) / abs(b) for a, b in zip(got.losses, alone.losses, strict=True))
        assert far <= close, f"rank {rank}'s losses are {far:.1e} off"
        assert got.norms == [n for n in got.norms if abs(n) > 0]
        for a, b in zip(got.norms, alone.norms, strict=True):
            assert abs(a - b) <= 1e-6 * b, "norms, in fp32"
        assert all(one != interconnects[rank] for one in got.staged), "within an island nothing goes through the host"
    assert any(got.staged for got in answers)
    of_steps = [farthest([got.gradients[k] for got in answers], alone.gradients[k]) for k in range(STEPS)]
    far, worst = max(of_steps)
    assert far <= close, f"the gradient of {worst} is {far:.1e} off"
    far, worst = farthest([got.weights for got in answers], alone.weights)
    assert far <= close, f"{worst} is {far:.1e} off"
    final = whole([got.weights for got in answers], alone.weights)
    start = {name: whole_value(name, tuple(value.shape)).double() for name, value in final.items()}
    assert not any(torch.equal(final[name], value) for name, value in start.items()), "it must really have trained"
