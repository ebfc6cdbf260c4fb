"""The same pipeline by torch's own schedules, to compare with: `pp_runner: torch`, and the oracle of the tests.

torch's stages find their batch by counting forward calls. Imported only when used: it takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
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

from erniekit.parallel.boundary import Boundary
from erniekit.parallel.fsdp import set_sharing
from erniekit.parallel.mesh import World
from erniekit.parallel.pipeline import HiddenShape, Loss, Pipeline, StageModule
from erniekit.parallel.world import check_schedule


class LayerStage(PipelineStage):
    """torch's stage, for what it does not support: a model that fully_shard has spread, and fp32 sums of gradients."""

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        set_sharing([self.submod.part], last_backward, self.submod.world)  # type: ignore[list-item, arg-type]
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        super().backward_weight_one_chunk(*args, **kwargs)
        # The zero-bubble schedule sets weight gradients past autograd's hooks, where the sums are made.
        for param in self.submod.parameters():
            if param.grad is not None:
                for hook in (param._post_accumulate_grad_hooks or {}).values():
                    hook(param)


class QueuedStage(StageModule):
    """A stage as torch's schedules call it: the batch comes from a queue."""

    def __init__(self, stage: StageModule) -> None:
        super().__init__(stage.part, stage.loss, stage.world)
        self.queue: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.on(x, self.queue.pop(0))


class TorchPipeline(Pipeline):
    def __init__(
        self,
        group: ProcessGroup,
        parts: list[tuple[int, nn.Module]],
        world: World,
        boundary: Boundary,
        device: torch.device,
        loss: Loss,
        name: str = "auto",
    ) -> None:
        super().__init__(parts, world, boundary, device, loss, name)
        check_schedule(name, self.world.layout, any(stage.part.mtp_weight for stage in self.modules.values()), "torch")
        self.group, self.schedule_name = group, name
        self.queued = {number: QueuedStage(stage) for number, stage in self.modules.items()}
        self._built: dict[tuple[int, ...], Any] = {}
        self._factors: Sequence[float] = []

    def run(self, batches: Sequence[Any], factors: Sequence[float], hidden_shape: HiddenShape) -> torch.Tensor:
        self._check(len(batches))
        self._factors = factors
        for module in self.queued.values():
            module.queue = list(batches)
        losses: list[torch.Tensor] = []
        schedule = self._schedule(batches, hidden_shape)
        ids = torch.cat([b.input_ids for b in batches])
        # Which micro-batch a loss is of travels as its number, chunked like the ids.
        numbers = torch.arange(len(batches), device=self.device)
        args = (ids,) if 0 in self.modules else ()
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
                for number, module in self.queued.items()
            ]
            self._built[key] = self._choose(stages, len(batches))
        return self._built[key]

    def _choose(self, stages: list[Any], micro_batches: int) -> Any:
        options: dict[str, Any] = dict(loss_fn=self._loss_of, scale_grads=False)
        name = self.schedule_name
        if name == "auto":
            name = "interleaved" if len(stages) > 1 else "1f1b" if micro_batches >= self.count else "gpipe"
        if len(stages) == 1:
            kind = ScheduleGPipe if name == "gpipe" or micro_batches < self.count else Schedule1F1B
            return kind(stages[0], micro_batches, **options)
        interleaved = ScheduleInterleavedZeroBubble if name == "zero_bubble" else ScheduleInterleaved1F1B
        return interleaved(stages, micro_batches, **options)

    def _loss_of(self, loss: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return loss.sum() * self._factors[int(number[0])]
