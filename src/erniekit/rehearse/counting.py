"""How much a rank computes between its calls, and on which stream: recorded while one step runs on tensors that have
shapes only. Called by recipes/rehearsal.py for `rehearse --timeline`.

Products and attention are counted in FLOPs. What lies between two of them is taken to be one pass over memory, as fused
kernels make it, which reads what products wrote and writes what the next ones read; the CPU's own many small passes
are not what a card does. Streams are those that fully_shard asks torch for: on a CPU torch gives it ones that do
nothing, in whose place ours note who waits for what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from erniekit.rehearse.calls import Trace
from erniekit.rehearse.moments import COMPUTES, CountedWork, Moments

_aten = torch.ops.aten
ATTENTION = {  # and where the queries stand among the arguments, and how often forward's FLOPs there are
    _aten._scaled_dot_product_flash_attention_for_cpu.default: (0, 1),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (1, 2),
}
# Passes over weights, gradients and states, and how often they read or write the bytes of their arguments.
UPDATES = {"_fused_adamw_": 2.0, "_foreach_mul_": 2.0, "_foreach_add_": 2.0, "_foreach_norm": 1.0, "add_": 1.5}


@contextmanager
def streams_seen(trace: Trace) -> Iterator[None]:
    """Entered before a model is built: fully_shard makes its streams when it is first used. What is on them is noted
    from `step_counted` on."""
    moments = trace.moments = Moments()
    made: dict[str, Any] = _streams(moments)
    before = {name: getattr(torch.cpu, name) for name in made if hasattr(torch.cpu, name)}
    try:
        for name, value in made.items():
            setattr(torch.cpu, name, value)
        yield
    finally:
        for name in made:
            setattr(torch.cpu, name, before[name]) if name in before else delattr(torch.cpu, name)


@contextmanager
def step_counted(trace: Trace) -> Iterator[None]:
    assert trace.moments is not None, "streams_seen first"
    with _Counting(trace.moments):
        trace.moments.begin()
        yield
        trace.moments.end()


def _streams(moments: Moments) -> dict[str, Any]:
    """torch.cpu's streams and events, those that note."""

    class NotedEvent:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.place = -1

        def record(self, stream: Any = None) -> NotedEvent:
            self.place = moments.record(moments.stream if stream is None else stream.number)
            return self

        def wait(self, stream: Any = None) -> None:
            moments.after(moments.stream if stream is None else stream.number, self.place)

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            self.wait()

    class NotedStream:
        made = COMPUTES

        def __init__(self, *_: Any, **__: Any) -> None:
            self.number = NotedStream.made
            NotedStream.made += 1

        def wait_stream(self, stream: NotedStream) -> None:
            self.wait_event(stream.record_event())

        def record_event(self, event: NotedEvent | None = None) -> NotedEvent:
            return (event or NotedEvent()).record(self)

        def wait_event(self, event: NotedEvent) -> None:
            event.wait(self)

    streams = {COMPUTES: NotedStream()}

    def current_stream(_: Any = None) -> NotedStream:
        return streams[moments.stream]

    @contextmanager
    def stream(of: NotedStream | None) -> Iterator[None]:
        if of is None:
            yield
            return
        streams[of.number] = of
        before = moments.switch(of.number)
        try:
            yield
        finally:
            moments.switch(before)

    return {"Event": NotedEvent, "Stream": NotedStream, "current_stream": current_stream, "stream": stream}


class _Counting(TorchDispatchMode):
    def __init__(self, moments: Moments) -> None:
        super().__init__()
        self.moments = moments

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace != "prim":
            count(self.moments.work, func, args, kwargs, out)
        return out


def count(work: CountedWork, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    name = func.overloadpacket.__name__
    if func in ATTENTION:
        first, times = ATTENTION[func]
        flops, keys = _attention(args, kwargs, first, out)
        work.attention[keys] = work.attention.get(keys, 0.0) + times * flops
        work.passes += _bytes(args) + _bytes(out)
    elif func.overloadpacket in flop_registry:
        work.products += flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
        work.passes += _bytes(args) + (0 if "out" in kwargs else _bytes(out)) + _bytes(kwargs.values())
    elif func.namespace == "erniekit" and name in OURS:
        given = dict(zip((argument.name for argument in func._schema.arguments), args))
        OURS[name](work, given, out)
    elif func.namespace == "fsdp":
        work.update += _bytes(args) + _bytes(kwargs.values())
    elif name in UPDATES:
        work.update += UPDATES[name] * (_bytes(args) + _bytes(kwargs.values()))


def _attention(args: Any, kwargs: Any, first: int, out: Any) -> tuple[float, int]:
    """FLOPs of the forward pass as models/costs.py counts them: half the square where a query looks back only."""
    q, k = args[first], args[first + 1]
    batch, heads, rows, width = q.shape
    causal = kwargs.get("attn_mask") is not None or any(value is True for value in (*args, *kwargs.values()))
    return (2.0 if causal else 4.0) * batch * heads * rows * k.shape[-2] * width, k.shape[-2]


# Ops of this package, whose bodies are not seen. given: their arguments by name.

Given = dict[str, Any]


def _experts(work: CountedWork, given: Given, out: Any) -> None:
    """(y, middle, ...)."""
    x, middle = given["x"], out[1]
    work.experts += _expert_flops(x, middle)
    work.passes += _expert_bytes(x, middle)


def _experts_backward(work: CountedWork, given: Given, out: Any) -> None:
    x, middle, wanted = given["x"], given["middle"], given["wanted"]
    trained = (2 * wanted[2] + wanted[3]) / 3  # of gate and up, and of down, which has half as many
    work.experts += (1 + trained) * _expert_flops(x, middle)
    work.passes += 2 * _expert_bytes(x, middle)


def _expert_flops(x: torch.Tensor, middle: torch.Tensor) -> float:
    """middle [rows, 2 * width]: gate and up; then down."""
    return 3.0 * middle.numel() * x.shape[-1]


def _expert_bytes(x: torch.Tensor, middle: torch.Tensor) -> float:
    """Rows taken and summed, and what lies between the two products. Weights are read while they are multiplied."""
    return float(x.element_size() * (2 * middle.shape[0] * x.shape[-1] + 1.5 * middle.numel()))


def _linear(work: CountedWork, given: Given, out: Any) -> None:
    work.products += 2.0 * given["x"].numel() * out.shape[-1]
    work.passes += _bytes(given.values()) + _bytes(out)


def _weight_gradient(work: CountedWork, given: Given, out: Any) -> None:
    work.products += 2.0 * given["grad"].numel() * given["x"].shape[-1]
    work.passes += _bytes((given["grad"], given["x"])) + _bytes(out)


def _adapted_linear(work: CountedWork, given: Given, out: Any) -> None:
    """(y, x A^T)."""
    x, rank = given["x"], given["A"].shape[0]
    work.products += 2.0 * (x.numel() * (out[0].shape[-1] + rank) + rank * out[0].numel())
    work.passes += _bytes(given.values()) + _bytes(out)


def _adapted_linear_backward(work: CountedWork, given: Given, out: Any) -> None:
    """wanted: of x, weight, bias, A, B."""
    grad, x, rank = given["grad"], given["x"], given["A"].shape[0]
    of_x, of_weight, _, of_A, of_B = given["wanted"]
    whole = (of_x + of_weight) * grad.numel() * x.shape[-1]
    low = ((of_x or of_A) + of_B) * grad.numel() + (of_x + of_A) * x.numel()
    work.products += 2.0 * (whole + rank * low)
    work.passes += _bytes(given.values()) + _bytes(out)


OURS: dict[str, Callable[[CountedWork, Given, Any], None]] = {
    "expert_mlp": _experts,
    "expert_mlp_backward": _experts_backward,
    "stored_linear": _linear,
    "stored_weight_gradient": _weight_gradient,
    "lora_linear": _adapted_linear,
    "lora_linear_backward": _adapted_linear_backward,
}


def _bytes(values: Any) -> float:
    if isinstance(values, torch.Tensor):
        return float(values.numel() * values.element_size())
    return sum(_bytes(each) for each in values if isinstance(each, (torch.Tensor, list, tuple)))
