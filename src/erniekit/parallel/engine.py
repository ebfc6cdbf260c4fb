"""Engine: one model on one or many ranks behind four verbs: train on micro-batches, sum gradients, evaluate, infer.

Built by apply.py; train/step.py, train/evaluate.py and the probe see only this, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from erniekit.devices.base import Device
from erniekit.model_contract import spread
from erniekit.parallel import comm, context
from erniekit.parallel.compiled import eager
from erniekit.parallel.fsdp import reshard, set_sharing
from erniekit.parallel.gradients import GradientSync
from erniekit.parallel.mesh import World
from erniekit.parallel.overlapped_reduce import OverlappedReduce
from erniekit.parallel.reduce import all_reduce, on_host
from erniekit.parallel.step_metrics import StepMetrics

if TYPE_CHECKING:
    from erniekit.parallel.pipeline import Pipeline

Loss = Callable[..., torch.Tensor]  # (model, batch, hidden states or nothing) -> the sum of a batch's token losses


class Engine:
    def __init__(
        self,
        parts: list[tuple[int, nn.Module]],
        world: World,
        device: Device,
        loss: Loss,
        sync: GradientSync | None = None,
        averaged_over: int = 1,
        pipeline: Pipeline | None = None,
        dtype: torch.dtype = torch.float32,
        one_document: Callable[[torch.Tensor, int], Any] | None = None,
    ) -> None:
        """dtype: of hidden states. one_document(ids, length): a batch of one row, padded to `length`."""
        self.parts, self.world, self.loss = [part for _, part in parts], world, loss
        self.hardware, self.device = device, device.handle
        self.sync, self.averaged_over, self.pipeline = sync, averaged_over, pipeline
        self.dtype, self.one_document = dtype, one_document
        layout = world.layout
        self.step_metrics: StepMetrics | None = None  # numbers of a step besides its loss
        # How much of a router loss each micro-batch's rows stand for.
        self.router_share = torch.ones((), device=self.device)
        self.usage: dict[int, torch.Tensor] = {}  # layer -> how often each expert was chosen in this rank's step
        self.loss_group = world.joined("pp", "dp", "fsdp", "cp")
        self.count_group = world.joined("dp", "fsdp")
        # Sequences are cut in cp x 2 chunks and those in tp slices.
        self.length_multiple = layout.length_multiple
        self._copies: Any = None  # a second stream, for copies
        # Called with a micro-batch's loss before its backward pass, where updates are made inside that.
        self.saw_loss: Callable[[torch.Tensor], None] = lambda loss: None
        self.last_backward: Callable[[], None] = lambda: None  # called before that of a step's last micro-batch

    @property
    def model(self) -> nn.Module:
        return self.parts[0]

    @property
    def fewest_micro_batches(self) -> int:
        """That a step can have, and a divisor of all numbers it can: several stages a rank take them in groups."""
        layout = self.world.layout
        return layout.pp if layout.virtual_stages > 1 else 1

    def train(self, on: bool = True) -> None:
        for part in self.parts:
            part.train(on)

    # --- one step ---

    def send(self, batches: Sequence[Any]) -> list[Any]:
        """A step's micro-batches on their way to a card, while it is still at the step before. Elsewhere, and where a
        sequence is cut first, they stay where they are."""
        if not self.hardware.asynchronous or self.world.layout.cp > 1:
            return list(batches)
        if self._copies is None:
            self._copies = self.hardware.stream()
        here = self.hardware.current_stream()
        with self.hardware.on_stream(self._copies):
            sent = [batch.to(self.device, self.hardware.pins_memory) for batch in batches]
        here.wait_stream(self._copies)
        for batch in sent:
            for tensor in batch.tensors():  # or its memory is given to the next copy while it is still read
                if tensor.device.type == self.device.type:  # grids of pictures stay on the host
                    self.hardware.record_stream(tensor, here)
        return sent

    def totals(self, *local: int) -> list[int]:
        """Counts of the whole step, over all ranks that read different packs."""
        if self.count_group is None:
            return list(local)
        counts = torch.tensor(local, dtype=torch.int64)  # on the host: it does not wait for the step before
        comm.all_reduce(counts, self.count_group)
        return counts.tolist()

    def forward_backward(self, batches: Sequence[Any], shares: Sequence[float]) -> torch.Tensor:
        """Gradients of sum(loss / share); returns this rank's part of that sum, detached: see `sum_losses`."""
        mine = [self._mine(batch) for batch in batches]
        rows = sum(batch.rows for batch in batches) * self.world.layout.data_ranks
        self.router_share.fill_(self.averaged_over / max(1, rows))
        if self.pipeline is not None:
            total = self._pipelined(mine, shares)
        else:
            total = torch.zeros((), device=self.device)
            for k, (batch, share) in enumerate(zip(mine, shares)):
                last = k == len(mine) - 1
                set_sharing(self.parts, last, self.world)
                if self.hardware.scales_in_loss:  # with the scale in the loss, the head forms its gradients once
                    loss = self.loss(self.model, batch, scale=self.averaged_over / share)
                    self._before_backward(loss, last)
                    loss.backward()
                    total += loss.detach() / self.averaged_over
                    continue
                loss = self.loss(self.model, batch) / share
                self._before_backward(loss, last)
                (loss * self.averaged_over).backward()
                total += loss.detach()
        self._read_records()
        return total

    def _before_backward(self, loss: torch.Tensor, last: bool) -> None:
        self.saw_loss(loss)
        if last:
            self.last_backward()

    def overlapped_reduce(
        self,
        params: Mapping[str, torch.Tensor],
        gradient_of: Callable[[str], torch.Tensor | None],
        keep: Callable[[str, torch.Tensor], None],
    ) -> OverlappedReduce | None:
        """Sums of gradients that begin inside backward; None where ranks exchange other tensors there:
        calls in two groups may come in another order on another rank, and NCCL would hang."""
        layout, group = self.world.layout, None if self.sync is None else self.sync.replica_group
        if self.sync is None or group is None or self.pipeline is not None or not layout.whole_layers:
            return None
        if spread(self.model).towers():  # whose backward has sums of its own
            return None
        if on_host(group) and self.device.type != "cpu":
            return None
        return OverlappedReduce({name: params[name] for name in self.sync.names}, group, gradient_of, keep)

    def _read_records(self) -> None:
        """What the layers noted of every micro-batch, into the step metrics."""
        records: Any = self.model.records or []
        for (name, layer), value in (item for record in records for item in record.items()):
            if name == "usage":
                self.usage[layer] = self.usage[layer] + value if layer in self.usage else value
            elif self.step_metrics is not None:
                self.step_metrics.add(name, *value)
        records.clear()

    def forget_records(self) -> None:
        """Of a pass that was only a rehearsal."""
        self.metric_means()
        self.usage.clear()

    def metric_means(self) -> torch.Tensor:
        """The step metrics' means over all ranks, in the order of their names."""
        if self.step_metrics is None:
            return torch.zeros(0, device=self.device)
        return self.step_metrics.reduce(self.loss_group)

    def _mine(self, batch: Any) -> Any:
        layout, at = self.world.layout, self.world.at
        cut = context.split(batch, at["cp"], layout.cp, spread(self.model).towers())
        return cut.to(self.device, self.hardware.pins_memory)

    def _pipelined(self, batches: Sequence[Any], shares: Sequence[float]) -> torch.Tensor:
        assert self.pipeline is not None
        factors = [self.averaged_over / share for share in shares]
        return self.pipeline.run(batches, factors, self._hidden_shape) / self.averaged_over

    def _hidden_shape(self, batch: Any) -> tuple[tuple[int, ...], torch.dtype]:
        B, L = batch.input_ids.shape
        layout = self.world.layout
        length = L // layout.tp if layout.sequence_parallel else L
        config: Any = self.model.config
        return (B, length, config.hidden_size), self.dtype

    # --- without gradient ---

    @torch.no_grad()
    def evaluate(self, batch: Any) -> torch.Tensor:
        """This rank's part of a batch's losses; `sum_losses` makes the whole of them."""
        mine = self._mine(batch)
        if self.pipeline is None:
            out: torch.Tensor | None = self.loss(self.model, mine)
        else:
            out = self.pipeline.forward(mine, self._hidden_shape)
        reshard(self.parts, self.world)
        return torch.zeros((), device=self.device) if out is None else out.sum()

    @torch.no_grad()
    def score(self, batch: Any, measure: Loss, size: int) -> torch.Tensor:
        """`measure(model, micro-batch, hidden states or nothing)` -> fp32 [size], the same on every rank that reads the
        batch: a reference's log-probabilities."""
        mine = self._mine(batch)
        if self.pipeline is None:
            out: torch.Tensor | None = measure(self.model, mine)
        else:
            found = self.pipeline.forward(mine, self._hidden_shape, measure=measure)
            out = self.pipeline.from_last(found, (size,), torch.float32)
        reshard(self.parts, self.world)
        assert out is not None
        return out

    def sum_losses(self, value: torch.Tensor) -> torch.Tensor:
        if self.loss_group is not None:
            all_reduce(value, self.loss_group)
        return value

    @torch.no_grad()
    def answer(self, batch: Any) -> torch.Tensor:
        """A batch's logits [B, L, V] on every rank; all ranks must call it. L must be a multiple of
        `length_multiple`."""
        layout = self.world.layout
        mine = self._mine(batch)
        if self.pipeline is None:
            out = self.model(mine.input_ids, mine.positions, mine.documents(), mine.max_doc, more=mine.more())
        else:
            found = self.pipeline.forward(mine, self._hidden_shape, logits=True)
            config: Any = self.model.config
            out = self.pipeline.from_last(found, (*mine.input_ids.shape, config.vocab_size), self.dtype)
        reshard(self.parts, self.world)
        if layout.cp > 1:
            parts = [torch.empty_like(out) for _ in range(layout.cp)]
            comm.all_gather(parts, out.contiguous(), self.world.group("cp"))
            out = context.in_order(torch.cat(parts, dim=1), layout.cp)
        result: torch.Tensor = out
        return result

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """[1, n] token ids -> [1, n, V], evaluation mode, on every rank."""
        assert self.one_document is not None
        count = ids.shape[1]
        length = -(-count // self.length_multiple) * self.length_multiple
        was_training = self.model.training
        self.train(False)
        with eager():
            out = self.answer(self.one_document(ids, length))
        self.train(was_training)
        return out[:, :count]
