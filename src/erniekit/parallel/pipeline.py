"""Pipeline parallelism: torch's schedules run over the stages of stages.py. Called by apply.py and engine.py.

Every rank reads the batch itself, so only hidden states travel; a stage finds its batch by counting its forward calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from erniekit.errors import PlanError
from erniekit.parallel import comm
from erniekit.parallel.fsdp import sync_gradients
from erniekit.parallel.mesh import World
from erniekit.parallel.world import check_schedule

Loss = Callable[..., torch.Tensor]  # (part, batch, hidden states) -> the sum of token losses
HiddenShape = Callable[[Any], tuple[tuple[int, ...], torch.dtype]]  # of what travels between stages


class LayerStage(PipelineStage):
    """torch's stage, for what it does not know: a model that fully_shard has spread, and fp32 sums of gradients."""

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        sync_gradients([self.submod.part], last_backward, self.submod.world)  # type: ignore[list-item, arg-type]
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        super().backward_weight_one_chunk(*args, **kwargs)
        # The zero-bubble schedule sets weight gradients past autograd's hooks, where the sums are made.
        for param in self.submod.parameters():
            if param.grad is not None:
                for hook in (param._post_accumulate_grad_hooks or {}).values():
                    hook(param)


class StageModule(nn.Module):
    """One stage as a schedule calls it: hidden states (or ids) in; out go hidden states, or from the last stage the sum
    of losses [1]. The batch comes from the queue."""

    def __init__(self, part: nn.Module, loss: Loss, world: World) -> None:
        super().__init__()
        self.part, self.loss, self.world = part, loss, world
        self.queue: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.on(x, self.queue.pop(0))

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
        group: ProcessGroup,
        device: torch.device,
        loss: Loss,
        schedule: str = "auto",
    ) -> None:
        check_schedule(schedule, world.layout, any(part.mtp_weight for _, part in parts))
        self.world, self.group, self.device, self.schedule = world, group, device, schedule
        self.count = world.layout.pp * world.layout.virtual_stages
        self.modules = [(number, StageModule(part, loss, world)) for number, part in parts]
        self._built: dict[tuple[int, ...], Any] = {}
        self._factors: Sequence[float] = []

    @property
    def has_last(self) -> bool:
        return any(number == self.count - 1 for number, _ in self.modules)

    def run(self, batches: Sequence[Any], factors: Sequence[float], hidden_shape: HiddenShape) -> torch.Tensor:
        """Forward and backward of sum(factor * loss); that sum on the last stage, zero elsewhere."""
        self._factors = factors
        for _, module in self.modules:
            module.queue = list(batches)
        losses: list[torch.Tensor] = []
        schedule = self._schedule(batches, hidden_shape)
        ids = torch.cat([b.input_ids for b in batches])
        # Which micro-batch a loss is of travels as its number, chunked like the ids.
        numbers = torch.arange(len(batches), device=self.device)
        args = (ids,) if any(number == 0 for number, _ in self.modules) else ()
        schedule.step(*args, target=numbers if self.has_last else None, losses=losses if self.has_last else None)
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.device)

    def _schedule(self, batches: Sequence[Any], hidden_shape: HiddenShape) -> Any:
        shape, dtype = hidden_shape(batches[0])
        key = (len(batches), *batches[0].input_ids.shape, *shape)
        if key not in self._built:
            ids = torch.empty(batches[0].input_ids.shape, dtype=torch.long, device="meta")
            hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
            losses = torch.empty(1, device="meta", requires_grad=True)
            stages = [
                LayerStage(
                    module,
                    number,
                    self.count,
                    self.device,
                    input_args=(ids if number == 0 else hidden,),
                    output_args=(losses if number == self.count - 1 else hidden,),
                    group=self.group,
                )
                for number, module in self.modules
            ]
            self._built[key] = self._choose(stages, len(batches))
        return self._built[key]

    def _choose(self, stages: list[Any], micro_batches: int) -> Any:
        options: dict[str, Any] = dict(loss_fn=self._loss_of, scale_grads=False)
        name = self.schedule
        if name == "auto":
            name = "interleaved" if len(stages) > 1 else "1f1b" if micro_batches >= self.count else "gpipe"
        if len(stages) == 1 and name in ("interleaved", "zero_bubble"):
            raise PlanError(
                f"schedule {name!r} needs several stages a rank",
                where="virtual_pp_degree",
                fix="set virtual_pp_degree: 2 or more, or pp_schedule: 1f1b",
            )
        if len(stages) == 1:
            kind = ScheduleGPipe if name == "gpipe" or micro_batches < self.count else Schedule1F1B
            return kind(stages[0], micro_batches, **options)
        if micro_batches % self.world.layout.pp:
            raise PlanError(
                f"{micro_batches} micro-batches do not divide over {self.world.layout.pp} pipeline ranks",
                where="gradient_accumulation_steps, virtual_pp_degree",
                fix=f"make gradient_accumulation_steps a multiple of {self.world.layout.pp}",
            )
        interleaved = ScheduleInterleavedZeroBubble if name == "zero_bubble" else ScheduleInterleaved1F1B
        return interleaved(stages, micro_batches, **options)

    def _loss_of(self, loss: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return loss.sum() * self._factors[int(number[0])]

    @torch.no_grad()
    def forward(
        self, batch: Any, hidden_shape: HiddenShape, logits: bool = False, measure: Loss | None = None
    ) -> torch.Tensor | None:
        """One micro-batch through all stages, no gradient: the last stage's losses, its logits or what `measure` finds;
        None elsewhere."""
        shape, dtype = hidden_shape(batch)
        x: torch.Tensor = batch.input_ids
        where = (batch.positions, batch.documents(), batch.max_doc)
        for number in range(self.count):
            owner = number % self.world.layout.pp
            mine = next((m for n, m in self.modules if n == number), None)
            if mine is not None:
                if logits:
                    x = mine.part(x, *where, more=batch.more())
                elif measure is not None and mine.part.last:
                    x = measure(mine.part, batch, x)
                else:
                    x = mine.on(x, batch)
            if number == self.count - 1:
                return x if mine is not None else None
            following = (number + 1) % self.world.layout.pp
            if owner != following and self.world.at["pp"] == owner:
                comm.send(x.contiguous(), following, self.group)
            elif owner != following and self.world.at["pp"] == following:
                x = torch.empty(shape, dtype=dtype, device=self.device)
                comm.recv(x, owner, self.group)
        return None
