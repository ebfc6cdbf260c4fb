"""Pipeline parallelism: this rank's list of actions, executed over the stages of stages.py. Called by engine.py.

Every rank reads the batch itself, so only hidden states and their gradients travel (boundary.py), and their shapes are
known before they arrive. The lists are pipeline_schedule.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from erniekit.errors import PlanError
from erniekit.parallel.boundary import Arriving, Boundary
from erniekit.parallel.fsdp import set_sharing
from erniekit.parallel.mesh import World
from erniekit.parallel.pipeline_actions import (
    BACKWARD,
    FORWARD,
    INPUT,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    WEIGHT,
    Action,
)
from erniekit.parallel.pipeline_schedule import resolved, schedule
from erniekit.parallel.split_backward import Waiting, backward_of_input
from erniekit.parallel.world import check_schedule

Loss = Callable[..., torch.Tensor]  # (part, batch, hidden states) -> the sum of token losses
HiddenShape = Callable[[Any], tuple[tuple[int, ...], torch.dtype]]  # of what travels between stages


class StageModule(nn.Module):
    """One stage: hidden states (or ids) in; out go hidden states, or from the last stage the sum of losses [1]."""

    def __init__(self, part: nn.Module, loss: Loss, world: World) -> None:
        super().__init__()
        self.part, self.loss, self.world = part, loss, world

    def on(self, x: torch.Tensor, batch: Any) -> torch.Tensor:
        if self.part.last:
            return self.loss(self.part, batch, x).reshape(1)
        result: torch.Tensor = self.part(x, batch.positions, batch.documents(), batch.max_doc, more=batch.more())
        return result


class Pipeline:
    def __init__(
        self,
        parts: list[tuple[int, nn.Module]],
        world: World,
        boundary: Boundary,
        device: torch.device,
        loss: Loss,
        name: str = "auto",
        splits: bool = True,
    ) -> None:
        """name: of the schedule. splits: gradients of inputs and of weights can be computed apart, which layers that
        are computed again or compiled cannot; there a zero-bubble schedule has both at once."""
        check_schedule(name, world.layout)
        self.world, self.boundary, self.device, self.splits = world, boundary, device, splits
        self.ranks, self.stages_each = world.layout.pp, world.layout.virtual_stages
        self.name = resolved(name, self.stages_each)
        self.count = self.ranks * self.stages_each
        self.modules = {number: StageModule(part, loss, world) for number, part in parts}

    @property
    def last_rank(self) -> int:
        return (self.count - 1) % self.ranks

    @property
    def has_last(self) -> bool:
        return self.count - 1 in self.modules

    def run(self, batches: Sequence[Any], factors: Sequence[float], hidden_shape: HiddenShape) -> torch.Tensor:
        """Forward and backward of sum(factor * loss); that sum on the last stage, zero elsewhere."""
        self._check(len(batches))
        step = _Step(self, batches, factors, hidden_shape)
        for action in schedule(self.name, self.ranks, self.stages_each, len(batches))[self.world.at["pp"]]:
            step.do(action)
        self.boundary.finish()
        losses = [step.losses[m] for m in sorted(step.losses)]
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)

    def _check(self, micro_batches: int) -> None:
        if self.stages_each > 1 and micro_batches % self.ranks:
            raise PlanError(
                f"a step's micro-batches ({micro_batches}) do not divide over {self.ranks} pipeline ranks",
                where="gradient_accumulation_steps, virtual_pp_degree",
                fix=f"make gradient_accumulation_steps a multiple of {self.ranks}",
            )

    def from_last(self, value: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What the last stage has, on every rank."""
        room = torch.empty(shape, dtype=dtype, device=self.device) if value is None else value
        return self.boundary.broadcast(room, self.last_rank)

    @torch.no_grad()
    def forward(
        self, batch: Any, hidden_shape: HiddenShape, logits: bool = False, measure: Loss | None = None
    ) -> torch.Tensor | None:
        """One micro-batch through all stages, no gradient: the last stage's losses, its logits or what `measure` finds;
        None elsewhere."""
        x: torch.Tensor = batch.input_ids
        where = (batch.positions, batch.documents(), batch.max_doc)
        here = self.world.at["pp"]
        for number in range(self.count):
            mine = self.modules.get(number)
            if mine is not None:
                if logits:
                    x = mine.part(x, *where, more=batch.more())
                elif measure is not None and mine.part.last:
                    x = measure(mine.part, batch, x)
                else:
                    x = mine.on(x, batch)
            if number == self.count - 1:
                break
            owner, following = number % self.ranks, (number + 1) % self.ranks
            if owner != following and here == owner:
                self.boundary.send(x, following)
            elif owner != following and here == following:
                x = self.boundary.receive(*hidden_shape(batch), owner).wait()
        self.boundary.finish()
        return x if self.has_last else None


@dataclass
class _Step:
    """One step's tensors on one rank, each from the action that makes it to the one that needs it last."""

    pipeline: Pipeline
    batches: Sequence[Any]
    factors: Sequence[float]
    hidden_shape: HiddenShape
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    arriving: dict[Action, Arriving] = field(default_factory=dict)  # by what receives it
    inputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # of a stage and micro-batch, as below
    outputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    given: dict[Action, torch.Tensor] = field(default_factory=dict)  # for another stage, by what sends it
    waiting: dict[tuple[int, int], Waiting] = field(default_factory=dict)

    def do(self, action: Action) -> None:
        kind, stage, m = action
        if kind == FORWARD:
            self.forward(stage, m)
        elif kind in (BACKWARD, INPUT):
            self.backward(stage, m, apart=kind == INPUT and self.pipeline.splits)
        elif kind == WEIGHT:
            if (pending := self.waiting.pop((stage, m), None)) is not None:
                pending.run()
        elif kind in (SEND_ACTIVATION, SEND_GRADIENT):
            self.pipeline.boundary.send(self.given.pop(action), action.peer.stage % self.pipeline.ranks)
        else:
            shape, dtype = self.hidden_shape(self.batches[m])
            source = action.peer.stage % self.pipeline.ranks
            self.arriving[action] = self.pipeline.boundary.receive(shape, dtype, source)

    def _taken(self, received: Action) -> torch.Tensor:
        """From another rank, or from a stage of this one."""
        if received in self.arriving:
            return self.arriving.pop(received).wait()
        return self.given.pop(received.peer)

    def forward(self, stage: int, m: int) -> None:
        last = stage == self.pipeline.count - 1
        if stage == 0:
            x = self.batches[m].input_ids
        else:
            x = self._taken(Action(RECEIVE_ACTIVATION, stage, m)).requires_grad_()
            self.inputs[stage, m] = x
        out = self.pipeline.modules[stage].on(x, self.batches[m])
        if last:
            out = out.sum() * self.factors[m]
            self.losses[m] = out.detach()
        else:
            self.given[Action(SEND_ACTIVATION, stage, m)] = out.detach()
        self.outputs[stage, m] = out

    def backward(self, stage: int, m: int, apart: bool) -> None:
        module = self.pipeline.modules[stage]
        out = self.outputs.pop((stage, m))
        x = self.inputs.pop((stage, m), None)
        grad = None if stage == self.pipeline.count - 1 else self._taken(Action(RECEIVE_GRADIENT, stage, m))
        set_sharing([module.part], m == len(self.batches) - 1, self.pipeline.world)
        passed: torch.Tensor | None
        if apart and x is not None:
            passed, self.waiting[stage, m] = backward_of_input(out, grad, x, module.parameters())
        else:
            if out.requires_grad:  # a first stage may have nothing to train
                torch.autograd.backward(out, grad)
            passed = None if x is None else x.grad
        if x is not None:
            assert passed is not None
            self.given[Action(SEND_GRADIENT, stage, m)] = passed
