"""Device: the project's interface to the hardware. One file per kind in this folder; listed in __init__.py.

What a kind can do is a class attribute, so that it is known without a card; what differs between cards of one kind is a
field. Claims are tried by probes.py, and `without` switches off what does not work. Streams, graphs and memory figures
are used only where the attributes above them are true.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch

from erniekit.errors import DeviceError
from erniekit.log import warn_once

GIB = 1024**3
# Capabilities (erniekit/capabilities.py) that a class attribute claims; the others are claimed by every accelerator.
CLAIMED_BY = {"triton": "triton", "bf16": "fast_bf16", "graphs": "records_graphs"}

AnyDevice = TypeVar("AnyDevice", bound="Device")


class Finding(NamedTuple):
    """Of `erniekit doctor`: what was looked at on this machine, and what to do where it is not well."""

    ok: bool
    what: str
    fix: str = ""


class Event(Protocol):
    """A mark in the device's work, as torch.cuda.Event has it."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float: ...  # milliseconds


class HostEvent:
    """For a device whose work is over when a call returns: the host's clock."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end_event: HostEvent) -> float:
        return (end_event.at - self.at) * 1e3


@dataclass(frozen=True)
class Device:
    name: str  # for people: "NVIDIA H200"
    type: str  # torch's name: cuda, cpu. Several vendors' builds of torch call theirs cuda
    total_memory: int  # bytes
    peak_flops: dict[torch.dtype, float] = field(default_factory=dict)  # dense, per second; empty = unknown

    vendor: ClassVar[str] = ""  # who made it: a name in DEVICES
    fabric: ClassVar[str] = ""  # what its collective library connects to, where not its vendor: `interconnect`
    backend: ClassVar[str] = "gloo"  # of torch.distributed; must also carry tensors of the host
    asynchronous: ClassVar[bool] = False  # calls return before the work is done: streams and events are real
    pins_memory: ClassVar[bool] = False  # copies from and to pinned host memory run parallel to the host's work
    counts_memory: ClassVar[bool] = False  # the runtime reports what is allocated
    fast_bf16: ClassVar[bool] = False  # bf16 is no slower than fp32
    triton: ClassVar[bool] = False  # Triton kernels run here: ours, and those of torch.compile
    records_graphs: ClassVar[bool] = False  # `graphed` and `recorded` work
    # A loss is multiplied by its scale where its gradients are formed, which saves a pass over them; elsewhere after.
    scales_in_loss: ClassVar[bool] = False
    # Capability -> why this kind has it not: known from its vendor's documentation, and not tried.
    lacks: ClassVar[Mapping[str, str]] = {}
    proven: ClassVar[frozenset[str]] = frozenset()  # capabilities that ran on cards of this kind: not tried again
    quiet_lacks: ClassVar[frozenset[str]] = frozenset()  # expected by a user of this kind: no line about it

    @property
    def claims(self) -> tuple[str, ...]:
        """Capabilities that this device may have, and that are tried unless proven. A CPU runs the definitions: of the
        operations that need an accelerator it claims none."""
        from erniekit.capabilities import CAPABILITIES

        card = self.handle.type != "cpu"
        return tuple(n for n in CAPABILITIES if (getattr(self, CLAIMED_BY[n]) if n in CLAIMED_BY else card))

    def without(self: AnyDevice, lacks: Mapping[str, str]) -> AnyDevice:
        """This device with what was claimed and does not work switched off."""
        if not lacks:
            return self
        made = copy.copy(self)
        for name in lacks:
            if name in CLAIMED_BY:
                object.__setattr__(made, CLAIMED_BY[name], False)  # over the class's claim, in this one only
        object.__setattr__(made, "lacks", dict(lacks))
        return made

    @property
    def handle(self) -> torch.device:
        return torch.device(self.type)

    @property
    def interconnect(self) -> str:
        """Ranks with the same one can form a group over their own collective library."""
        return self.fabric or self.vendor

    def bind(self, index: int) -> None:
        """This process uses the machine's device of that number from now on."""

    def share(self, rank: int, ranks: int) -> Device:
        """This device for one of several ranks on it, before they meet: with its part of the memory."""
        return replace(self, total_memory=self.total_memory // ranks)

    def capability(self) -> tuple[int, int] | None:
        """NVIDIA's compute capability; None for all others."""
        return None

    def smi_id(self) -> str | None:
        """What `nvidia-smi -i` calls this card; None where there is no such tool."""
        return None

    # --- time ---

    def synchronise(self, handle: torch.device | None = None) -> None:
        """Waits for all that was launched; handle: on that very device of several of this kind."""

    def event(self) -> Event:
        """With a time; `record` puts it behind what the current stream was given so far."""
        return HostEvent()

    def stream(self) -> Any:
        """A new one, parallel to that which computes. This and the next three: where work is asynchronous."""
        raise NotImplementedError

    def current_stream(self) -> Any:
        """Has wait_stream(other) and wait_event(event)."""
        raise NotImplementedError

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """What is launched inside goes to that stream."""
        raise NotImplementedError

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """The tensor's memory is not given away before the stream has done what it was given so far."""
        raise NotImplementedError

    def graphed(self, module: Callable[..., Any], inputs: tuple[torch.Tensor, ...], memory: Any = None) -> Any:
        """`module` recorded for inputs of these shapes, forward and backward; calls to it are replayed. memory: of
        `graph_memory`, where recordings share it that never run at once; None: its own."""
        raise NotImplementedError

    def graph_memory(self) -> Any:
        """For recordings that share their memory."""
        raise NotImplementedError

    def recorded(self, work: Callable[[], None]) -> Callable[[], None]:
        """`work` is run, and recorded: calls of the result launch the same on the same tensors, at once; the result
        keeps those that `work` names. What it leaves in tensors of its own is good until the next call of anything
        recorded here."""
        raise NotImplementedError

    # --- memory, in bytes ---

    def free_memory(self) -> tuple[int, int]:
        """What no process uses, and all there is. Of a kind without its own: half of all, after a line that says so."""
        kind = type(self).__name__
        if self.total_memory <= 0:
            raise DeviceError(
                f"{self.name} does not say how much memory it has: a cache cannot be sized",
                where=f"{kind}.free_memory(), {kind}.total_memory",
                fix="device=cpu; to have it on that device, free_memory() has to be written (docs/adding-a-device.md)",
            )
        total = self.total_memory
        warn_once(
            f"{self.name}: its free memory is not known ({kind} has no free_memory()): half of {total / GIB:.1f} GiB "
            "is taken for free; gpu_memory_utilization, max_model_len and max_num_seqs make a cache smaller"
        )
        return min(total // 2, max(0, total - self.reserved())), total

    def usable_memory(self, share: float) -> int:
        """What a cache may take, where `share` of all memory may be used by everything together."""
        free, total = self.free_memory()
        return max(0, int(free - (1 - share) * total))

    def allocated(self) -> int:
        return 0

    def reserved(self) -> int:
        return 0

    def peak_allocated(self) -> int:
        """The most since `reset_peak`."""
        return 0

    def peak_reserved(self) -> int:
        return 0

    def reset_peak(self) -> None:
        return None

    def empty_cache(self) -> None:
        """Memory that is reserved and not allocated goes back."""

    def memory(self) -> dict[str, float]:
        """GiB in ERNIEKit's metric names; empty where the runtime does not count."""
        if not self.counts_memory:
            return {}
        return {
            "current_memory_allocated": self.allocated() / GIB,
            "current_memory_reserved": self.reserved() / GIB,
            "max_memory_allocated": self.peak_allocated() / GIB,
            "max_memory_reserved": self.peak_reserved() / GIB,
        }

    # --- chance ---

    def seed(self, seed: int) -> None:
        """Of the host's generator and the device's."""
        torch.manual_seed(seed)

    def same_bits(self) -> None:
        """From now on the same computation gives the same bits; where it always does, nothing is to be done."""

    def rng_state(self) -> torch.Tensor | None:
        return None

    def set_rng_state(self, state: torch.Tensor) -> None:
        return None
