"""Runner: a way to train a workload's model, ours or a peer's. Implemented by ours.py and peers/; used by turns.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from erniekit.bench.data import StepData
from erniekit.bench.workloads import BenchOptions, Workload
from erniekit.devices.base import Device

PROBE = 96  # tokens whose logits are compared
KEPT = ("task", "note", "thrifty", "waits", "planned")  # of a runner that was closed


@dataclass(frozen=True)
class Task:
    """What a runner is given."""

    workload: Workload
    options: BenchOptions
    folder: Path  # holds only config.json
    hardware: Device
    dtype: torch.dtype
    steps: list[StepData]

    def data(self, number: int) -> StepData:
        return self.steps[number % len(self.steps)]

    @property
    def device(self) -> torch.device:
        return self.hardware.handle

    @property
    def vocab(self) -> int:
        return int(self.workload.model["vocab_size"])

    def probe(self) -> torch.Tensor:
        """Token ids [1, n]: the same for all programs."""
        generator = torch.Generator().manual_seed(self.options.seed)
        return torch.randint(3, self.vocab, (1, PROBE), generator=generator).to(self.device)


@dataclass
class StepNumbers:
    """What is measured in a step: numbers, or tensors still on the device. Read only after the clock has stopped."""

    loss: Any
    numbers: Mapping[str, Any] = field(default_factory=dict)  # to be compared where both sides have them

    def values(self) -> dict[str, float]:
        return {"loss": float(self.loss), **{name: float(value) for name, value in self.numbers.items()}}


class Runner:
    name = ""
    note = ""  # a remark on this run for the reader of the result

    def __init__(self, task: Task) -> None:
        self.task = task
        self.waits: dict[int, float] = {}  # by step: seconds that the device was idle without data

    def build(self) -> None:
        """Model and optimiser on the device."""
        raise NotImplementedError

    def step(self, number: int) -> StepNumbers:
        """One whole training step: batch to the device, forward, backward, clip, update. No waiting for the device
        unless the trainer itself waits."""
        raise NotImplementedError

    def probe_logits(self) -> torch.Tensor:
        """fp32 [n, V] of task.probe(), by the weights as they are now."""
        raise NotImplementedError

    def trainable(self) -> int:
        raise NotImplementedError

    def save_memory(self) -> bool:
        """After an out-of-memory, between close() and build(): True when the next build is a thriftier one."""
        return False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Around everything this runner does: where it changes classes others use, it does so in here."""
        yield

    def close(self) -> None:
        """Frees all memory, also that of an unfinished build; build() may follow."""
        for name in [name for name in vars(self) if name not in KEPT]:
            delattr(self, name)


class Patch:
    """Attributes some code sets on shared classes or modules: put in by `on`, taken out by `off`."""

    def __init__(self, *places: tuple[Any, str]) -> None:
        self.places = places
        self._plain: list[Any] = []
        self._patched: list[Any] | None = None

    @contextmanager
    def on(self, apply: Callable[[], None]) -> Iterator[None]:
        """apply: the peer's own patching function, called the first time."""
        self._plain = [getattr(owner, name) for owner, name in self.places]
        if self._patched is None:
            apply()
            self._patched = [getattr(owner, name) for owner, name in self.places]
        else:
            self._set(self._patched)
        try:
            yield
        finally:
            self._set(self._plain)

    def _set(self, values: list[Any]) -> None:
        for (owner, name), value in zip(self.places, values):
            setattr(owner, name, value)
