"""`erniekit bench --calibrate`: what this device does a second, in the parts that `erniekit plan` adds up.

Products by shape, grouped products, attention by length, element-wise passes, the optimiser's, launches, copies from
the host, and links where several ranks are started. Each is repeated until the clock that the device holds has settled.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from erniekit.devices import pick
from erniekit.devices.base import Device
from erniekit.kernels.grouped_gemm import grouped_product
from erniekit.models.costs import ATTENTION_BACKWARD, ATTENTION_FORWARD
from erniekit.parallel.world import ranks_started

FILE = "calibration.json"
FORMAT = "erniekit-calibration-1"
SETTLE, TIMED = 0.7, 0.3  # seconds of each, after which a card holds its clock
# Rows, inputs, outputs of the models' products; experts with rows of each, inputs, outputs.
PRODUCTS = ((8192, 1024, 6144), (8192, 2560, 3584), (8192, 5120, 13824), (8192, 8192, 8192), (2048, 2560, 103424))
GROUPED = ((64, 768, 2560, 3072), (64, 192, 2560, 3072), (64, 1024, 8192, 7168))
LENGTHS = (512, 1024, 4096, 8192, 32768)
NUMBERS = 1 << 28  # of an element-wise pass
TINY = dict(
    products=((64, 32, 96), (64, 64, 64)), grouped=((4, 16, 32, 64),), lengths=(32, 64), numbers=1 << 16, settle=0.01
)
LAYER_CALLS = 90  # launches of a compiled dense layer, both ways


def calibrated(tiny: bool = False) -> dict[str, Any]:
    device = pick()
    of = dict(products=PRODUCTS, grouped=GROUPED, lengths=LENGTHS, numbers=NUMBERS, settle=SETTLE)
    of |= TINY if tiny else {}
    clock = Clock(device, of["settle"], of["settle"] if tiny else TIMED)  # type: ignore[arg-type]
    dtype = torch.bfloat16 if device.fast_bf16 else torch.float32
    found: dict[str, Any] = {"format": FORMAT, "device": device.name, "dtype": str(dtype).removeprefix("torch.")}
    with torch.no_grad():
        found["dense"] = [dense(clock, dtype, *shape) for shape in of["products"]]  # type: ignore[attr-defined]
        found["grouped"] = [grouped(clock, dtype, *shape) for shape in of["grouped"]]  # type: ignore[attr-defined]
        found |= passes(clock, of["numbers"])  # type: ignore[arg-type]
        found["layer_launch"] = LAYER_CALLS * launch(clock)
    found["attention"] = [attention(clock, dtype, length) for length in of["lengths"]]  # type: ignore[attr-defined]
    if device.pins_memory:
        found["host"] = from_host(clock, of["numbers"])  # type: ignore[arg-type]
    if ranks_started() > 1:
        found["link"] = link(clock, of["numbers"])  # type: ignore[arg-type]
    return found


class Clock:
    """Seconds of a call at the clock that the device holds: warm for `settle` seconds, then the median of the rest."""

    def __init__(self, device: Device, settle: float, timed: float) -> None:
        self.device, self.settle, self.timed = device, settle, timed

    def seconds(self, call: Callable[[], Any]) -> float:
        self._for(call, self.settle)
        return statistics.median(self._for(call, self.timed))

    def _for(self, call: Callable[[], Any], seconds: float) -> list[float]:
        end, found = time.monotonic() + seconds, []
        while True:
            first, last = self.device.event(), self.device.event()
            first.record()
            call()
            last.record()
            last.synchronize()
            found.append(max(1e-9, first.elapsed_time(last) / 1e3))
            if time.monotonic() >= end:
                return found

    def numbers(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Random: a product of zeros draws less power, and runs faster than any training."""
        return torch.randn(*shape, device=self.device.handle).to(dtype)


def dense(clock: Clock, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> dict[str, float]:
    x, w = clock.numbers(rows, inputs, dtype=dtype), clock.numbers(outputs, inputs, dtype=dtype)
    flops = 2.0 * rows * inputs * outputs
    seconds = clock.seconds(lambda: F.linear(x, w))
    return {"rows": rows, "inputs": inputs, "outputs": outputs, "flops": flops, "rate": flops / seconds}


def grouped(clock: Clock, dtype: torch.dtype, experts: int, rows: int, inputs: int, outputs: int) -> dict[str, float]:
    x, w = clock.numbers(experts * rows, inputs, dtype=dtype), clock.numbers(experts, outputs, inputs, dtype=dtype)
    ends = torch.arange(1, experts + 1, dtype=torch.int32, device=clock.device.handle) * rows
    flops = 2.0 * experts * rows * inputs * outputs
    seconds = clock.seconds(lambda: grouped_product(x, w.mT, ends))
    return {"experts": experts, "rows": rows, "inputs": inputs, "outputs": outputs, "flops": flops,
            "rate": flops / seconds}  # fmt: skip


def attention(clock: Clock, dtype: torch.dtype, length: int, heads: int = 16, width: int = 128) -> dict[str, float]:
    """Causal, both ways, as models/costs.py counts it."""
    q, k, v = (clock.numbers(1, heads, length, width, dtype=dtype).requires_grad_() for _ in range(3))

    def both() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    flops = float((ATTENTION_FORWARD + ATTENTION_BACKWARD) * heads * width * length**2)
    return {"length": length, "rate": flops / clock.seconds(both)}


def passes(clock: Clock, count: int) -> dict[str, float]:
    """Bytes a second of a pass that reads two tensors and writes one, and of an update of fp32 states."""
    a, b = (clock.numbers(count, dtype=torch.float32) for _ in range(2))
    out = torch.empty_like(a)
    once = clock.seconds(lambda: torch.add(a, b, out=out))
    update = clock.seconds(lambda: a.lerp_(b, 0.1))
    return {"elementwise": 12.0 * count / once, "update": 12.0 * count / update}


def launch(clock: Clock, calls: int = 200) -> float:
    """Seconds the host needs for one small operation."""
    x = clock.numbers(8, dtype=torch.float32)

    def many() -> None:
        for _ in range(calls):
            x.add_(0.0)

    clock.device.synchronise()
    many()
    clock.device.synchronise()
    began = time.perf_counter()
    many()
    return (time.perf_counter() - began) / calls


def from_host(clock: Clock, count: int) -> float:
    kept = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(count, dtype=torch.uint8, device=clock.device.handle)
    return count / clock.seconds(lambda: there.copy_(kept, non_blocking=True))


def link(clock: Clock, count: int) -> float:
    """Bytes a second that a ring of all ranks reaches, by its all-reduce. Ranks are those torchrun has started."""
    import torch.distributed as dist

    from erniekit.parallel import comm

    if not dist.is_initialized():
        dist.init_process_group(clock.device.backend)
    x = torch.ones(count // 4, device=clock.device.handle)
    ranks = comm.size_of()
    for _ in range(3):
        comm.all_reduce(x)
    clock.device.synchronise()
    began = time.perf_counter()
    for _ in range(5):
        comm.all_reduce(x)
    clock.device.synchronise()
    seconds = (time.perf_counter() - began) / 5
    return 2 * (ranks - 1) / ranks * x.numel() * 4 / seconds


def lines(found: dict[str, Any]) -> list[str]:
    out = [f"{found['device']}, {found['dtype']}"]
    for row in found["dense"]:
        out.append(f"product {row['rows']} x {row['inputs']} x {row['outputs']}: {row['rate'] / 1e12:.3g} TFLOP/s")
    for row in found["grouped"]:
        name = f"{row['experts']} experts x {row['rows']} rows x {row['inputs']} x {row['outputs']}"
        out.append(f"grouped {name}: {row['rate'] / 1e12:.3g} TFLOP/s")
    out += [f"attention of {row['length']} tokens: {row['rate'] / 1e12:.3g} TFLOP/s" for row in found["attention"]]
    for name in ("elementwise", "update", "host", "link"):
        out += [f"{name}: {found[name] / 1e9:.3g} GB/s"] if name in found else []
    return [*out, f"launches of a layer: {found['layer_launch'] * 1e3:.2f} ms"]
