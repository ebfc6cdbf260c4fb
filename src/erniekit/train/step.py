"""One optimiser step: micro-batches in, one update out. Called by train/trainer.py.

The loss is divided by the trained tokens of the whole step over all ranks, so 8 x 1, 1 x 8 and any layout give the
same gradient. On one card the host never waits in here: the device decides whether an update is applied, and a step's
numbers are read when they have arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from erniekit.data.types import Batch, PictureCounts
from erniekit.devices.base import Device, Event
from erniekit.optim.adamw import AdamW
from erniekit.optim.in_backward import BackwardUpdates, after_gradients
from erniekit.optim.schedule import Schedule
from erniekit.parallel.engine import Engine
from erniekit.parallel.mesh import World


@dataclass(frozen=True)
class StepResult:
    """The numbers of one optimiser step, of all ranks together."""

    step: int
    loss: float  # mean over trained tokens
    grad_norm: float  # before clipping
    learning_rate: float
    tokens: int  # of all ranks, as are the next two
    trained_tokens: int
    sum_squares: int  # of document lengths
    applied: bool  # False: not finite, nothing was changed
    extras: dict[str, float] = field(default_factory=dict)  # further values of the step: rewards, router losses
    brought: dict[str, torch.Tensor] = field(default_factory=dict)  # what hooks requested with `Launched.bring`
    finished_at: float = field(default_factory=time.perf_counter)  # however late it is looked at
    # With updates inside backward: not applied, yet the loss was a number; tensors with sound gradients were updated.
    partly: bool = False
    shown: PictureCounts = field(default_factory=PictureCounts)  # of all ranks, in pictures


class DeviceClock:
    """When the device came to an event, on the host's clock, which may look only long after."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._last: tuple[Event, float] | None = None

    def start(self) -> None:
        """Once, before the first step: waits for the device. All later times are counted from this one by the
        device only. Where the host's first look came late, that delay would be taken off a later step's time."""
        if self._last is None:
            event = self.device.event()
            event.record()
            event.synchronize()
            self._last = (event, time.perf_counter())

    def time_of(self, event: Event) -> float:
        """Of events that have happened, in their order."""
        assert self._last is not None, "start comes first"
        before, then = self._last
        self._last = (event, then + before.elapsed_time(event) / 1e3)
        return self._last[1]


class Launched:
    """A step whose work is given to the device, and whose numbers may still be on their way to the host."""

    def __init__(
        self,
        numbers: torch.Tensor,
        good: torch.Tensor,
        read: Callable[[list[float]], StepResult],
        clock: DeviceClock | None = None,
    ) -> None:
        """numbers: loss, gradient norm and the step metrics' means; `read` makes the result of them. good: fp32 [], on
        the same device: 1 where both are finite and the update is applied, else 0. clock: of the device that has yet to
        compute the numbers; None where they are on the host already."""
        self.good, self._read, self._clock = good, read, clock
        self._moving: dict[str, torch.Tensor] = {"": numbers}
        self._arrived: Event | None = None
        self._sent_at = 0.0

    def bring(self, name: str, tensor: torch.Tensor) -> None:
        """The tensor's values with the result; before `send`."""
        self._moving[name] = tensor

    def send(self) -> None:
        """Everything on its way to the host, behind all that was launched so far, without a wait. Where the numbers are
        there already, what was brought stays on the device, for a reader that waits for it."""
        if self._clock is not None:
            self._moving = {name: value.to("cpu", non_blocking=True) for name, value in self._moving.items()}
            self._arrived = self._clock.device.event()
            self._arrived.record()
        self._sent_at = time.perf_counter()

    def result(self) -> StepResult:
        """Waits for the device where it has not come so far."""
        at = self._sent_at or time.perf_counter()
        if self._arrived is not None and self._clock is not None:
            self._arrived.synchronize()
            at = self._clock.time_of(self._arrived)
        brought = {name: tensor for name, tensor in self._moving.items() if name}
        return replace(self._read(self._moving[""].tolist()), brought=brought, finished_at=at)


class TrainStep:
    def __init__(
        self,
        engine: Engine,
        optimizer: AdamW,
        schedule: Schedule,
        max_grad_norm: float = 1.0,
        mean_of_means: bool = False,
        prepare: Callable[[Sequence[Batch]], Sequence[Batch]] | None = None,
        in_backward: BackwardUpdates | None = None,
    ) -> None:
        """prepare: what must be known of a step's micro-batches before their forward pass, e.g. a reference's view.
        in_backward: makes the updates, of a single micro-batch and rank, inside its backward pass."""
        self.engine, self.optimizer, self.schedule = engine, optimizer, schedule
        self.max_grad_norm = max_grad_norm
        # ERNIEKit: the mean of micro-batch means, so a micro-batch with few trained tokens weighs as much as any.
        self.mean_of_means = mean_of_means
        self.prepare, self.in_backward = prepare, in_backward
        self.phase: Callable[[str], None] = lambda name: None  # set by the trainer
        self._clock = DeviceClock(engine.hardware)
        self._early = engine.overlapped_reduce(optimizer.params, optimizer.gradient_of, optimizer.keep_gradient)
        if self._early is not None:
            after_gradients(optimizer, self._early.ready)
            engine.last_backward = self._early.begin

    @property
    def late(self) -> bool:
        return results_come_late(self.optimizer, self.engine.world)

    def __call__(self, batches: Sequence[Batch], step: int) -> StepResult:
        return self.launch(batches, step).result()

    def launch(self, batches: Sequence[Batch], step: int) -> Launched:
        engine, optimizer = self.engine, self.optimizer
        clock = self._clock if self.late and engine.hardware.asynchronous else None
        if clock is not None:
            clock.start()
        # Waiting for other ranks does not count as this rank's own work: that is how a slow rank is found.
        self.phase("collective")
        batches = engine.send(batches)
        counted = [(b.weight, b.num_label_tokens, b.num_tokens, b.sum_squares, *b.shown()) for b in batches]
        weight, trained, tokens, squares, *shown = engine.totals(*map(sum, zip(*counted)))
        self.phase("forward/backward")
        if self.prepare is not None:
            batches = self.prepare(batches)
        lr = self.schedule.for_update(step)
        inside = self.in_backward
        if inside is not None:
            assert len(batches) == 1
            if inside.needs_norm:
                with inside.measured():
                    engine.forward_backward(batches, self._shares(batches, weight))
                engine.forget_records()
            inside.begin(lr)
            engine.saw_loss = inside.saw_loss
        total = engine.forward_backward(batches, self._shares(batches, weight))
        self.phase("collective")
        # Before any other call between ranks: one that lacked a gradient has some of these still to send.
        done = frozenset() if self._early is None else self._early.finish()
        total = engine.sum_losses(total)
        norm = self._norm(done) if inside is None else inside.end()
        numbers = torch.cat(
            (torch.stack((total, norm.to(total.device))).double(), engine.metric_means().to(total.device))
        )
        if not self.late:
            numbers = numbers.cpu()
        good = numbers[:2].isfinite().all().float()
        # Both numbers are the same on every rank, and so is the decision.
        applied = self.late or bool(good)
        self.phase("update")
        if applied and inside is None:
            optimizer.clip(norm, self.max_grad_norm)
            optimizer.step(lr, good if self.late else None)
        optimizer.zero_grad()
        names = engine.step_metrics.names if engine.step_metrics is not None else ()

        def read(values: list[float]) -> StepResult:
            loss, norm, *extras = values
            metrics = {name: value for name, value in zip(names, extras) if _finite(value)}
            applied = _finite(loss) and _finite(norm)
            partly = inside is not None and _finite(loss) and not applied
            counts = (tokens, trained, squares)
            return StepResult(
                step, loss, norm, lr, *counts, applied, metrics, partly=partly, shown=PictureCounts(*shown)
            )

        return Launched(numbers, good, read, clock)

    def _norm(self, done: frozenset[str]) -> torch.Tensor:
        """Of the whole model's gradient; where there are other ranks, after theirs were added. done: gradients to which
        they were added inside backward."""
        if self.engine.sync is None:
            return self.optimizer.gradient_norm()
        grads = self.optimizer.all_gradients()
        self.engine.sync.reduce(grads, done)
        return self.engine.sync.norm(grads)

    def _shares(self, batches: Sequence[Batch], weight: int) -> list[float]:
        """What each micro-batch's sum of losses is divided by."""
        if self.mean_of_means:
            means = len(batches) * self.engine.world.layout.data_ranks
            return [max(1, b.weight) * means for b in batches]
        return [max(1, weight)] * len(batches)


def results_come_late(optimizer: AdamW, world: World) -> bool:
    """Results may come after the next step's launch: nothing in between needs them on the host. On unlike devices they
    never do: one side would launch while the other waits for it to agree on the step before."""
    return optimizer.fused is not None and world.islands is None


def _finite(value: float) -> bool:
    return value - value == 0.0
