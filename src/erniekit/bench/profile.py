"""Where a step's device time goes: by kind of kernel, and the longest kernels by name. Called by turns.py."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from erniekit.devices.base import Device
from erniekit.intervals import Interval, both, joined, length

# The first that matches a kernel's name, in lower case.
KINDS = (
    ("attention", r"flash|fmha|sdpa|attention|_attn|varlen|cudnn::fusion|^_sum_places$"),
    ("experts' rows", r"^_(?:take|activate|sum_choices|outer|add_low)(?:_[a-z0-9_]+)?$"),
    ("positions and swiglu", r"^(?:turn|turn_back|forward|backward)(?:_\d+)?$"),
    ("grouped", r"grouped|group_gemm|groupproblem|expert.*mm"),
    ("loss and softmax", r"^_rows$|cross_entropy|token_loss|nll|^(?!triton_).*softmax"),
    ("copy", r"multi_tensor.*copy"),  # lists of tensors at once, as fully_shard gathers them
    ("optimizer", r"^(?:update|squares)$|adam|multi_tensor|foreach|lpnorm"),
    ("element-wise", r"^triton_(?:poi|red|per|for)_"),  # what the compiler fused, whatever its name lists
    ("gemm", r"gemm|cutlass|cublas|nvjet|xmma|wgmma|splitk|addmm|\bb?mm\b|matmul|gemv|linear|^triton_tem_"),
    ("copy", r"memcpy|memset|copy"),
    ("sort and index", r"sort|radix|scan|index|gather|scatter|topk|histogram"),
    ("element-wise", r"elementwise|reduce|vectorized|fused|norm|rope|swiglu|silu|mul|add"),
)
TOP = 30
PAUSES = 8
AHEAD = 2.0  # seconds of steps before the recorded ones
MOST_AHEAD = 100  # steps: the recorder's buffers hold what they launch
LONG = 1.0  # seconds: of a step that takes longer, one is enough
COLLECTIVE = "nccl"  # in the name of its kernels
NOT_A_KERNEL = ("Activity Buffer Request", "Command Buffer Full")  # the recorder's own work, listed with the device's


class KernelSpan(NamedTuple):
    kernel: str
    start: int  # ns
    ns: int


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")


def steps_for(step_s: float, card: bool) -> tuple[int, int]:
    """How many steps to run ahead and how many to record, when one takes step_s seconds."""
    before = math.ceil(AHEAD / step_s) if card else 1
    return min(MOST_AHEAD, before), 1 if step_s > LONG else 2


def profile_steps(step: Callable[[int], Any], first: int, before: int, count: int, device: Device) -> dict[str, Any]:
    """before: so many steps (one or more) run right ahead, for a card's clocks fall in a long run and its kernels take
    longer. The recorder is open already, as opening it for the first time is a pause in which they would rise again."""
    from torch.profiler import ProfilerActivity, profile, schedule

    # The profiler names devices as torch does. No events of the host with a card's: there are many more of them.
    activity = getattr(ProfilerActivity, device.type.upper(), ProfilerActivity.PrivateUse1)
    card = activity != ProfilerActivity.CPU
    with profile(activities=[activity], schedule=schedule(wait=0, warmup=before, active=count, repeat=1)) as recorded:
        for number in range(first, first + before + count):
            step(number)
            # What was launched ahead is not to be counted, and what was recorded is to be over.
            if card and number + 1 in (first + before, first + before + count):
                device.synchronise()
            recorded.step()
    spans = spans_of(recorded, device) if card else []
    times = by_name(spans) if card else operators_of(recorded)
    found = summary({name: (ms / count, max(1, calls // count)) for name, (ms, calls) in times.items()})
    return {**found, **idle(spans, count)} if card else found


def spans_of(recorded: Any, device: Device) -> list[KernelSpan]:
    """The raw events: key_averages() gives the same of kernels and takes a tenth of a millisecond for each, and for
    each launch."""
    kind = getattr(torch.autograd.DeviceType, device.type.upper(), torch.autograd.DeviceType.PrivateUse1)
    events = recorded.profiler.kineto_results.events()
    mine = (e for e in events if e.device_type() == kind and not e.is_user_annotation())
    return [KernelSpan(e.name(), e.start_ns(), e.duration_ns()) for e in mine if e.name() not in NOT_A_KERNEL]


def by_name(spans: list[KernelSpan]) -> dict[str, tuple[float, int]]:
    """Milliseconds and calls."""
    times: dict[str, tuple[float, int]] = {}
    for span in spans:
        ms, calls = times.get(span.kernel, (0.0, 0))
        times[span.kernel] = (ms + span.ns / 1e6, calls + 1)
    return times


def idle(spans: list[KernelSpan], steps: int) -> dict[str, Any]:
    """Milliseconds of a step in which nothing ran, and between which kernels most of them lie."""
    pauses: dict[tuple[str, str], tuple[float, int]] = {}
    last, until = "", 0
    for span in sorted(spans, key=lambda each: each.start):
        if last and span.start > until:
            ms, times = pauses.get((last, span.kernel), (0.0, 0))
            pauses[last, span.kernel] = (ms + (span.start - until) / 1e6, times + 1)
        if span.start + span.ns > until:
            last, until = span.kernel, span.start + span.ns
    longest = sorted(pauses.items(), key=lambda item: -item[1][0])[:PAUSES]
    return {
        "idle_ms": sum(ms for ms, _ in pauses.values()) / steps,
        "pauses": [
            {"after": after, "before": before, "ms": ms / steps, "times": max(1, times // steps)}
            for (after, before), (ms, times) in longest
        ],
    }


def overlap(spans: Iterable[KernelSpan]) -> dict[str, float]:
    """Of one rank: milliseconds of its calls between ranks, of its other kernels, and of both at once."""
    split: tuple[list[Interval], list[Interval]] = ([], [])
    for span in spans:
        split[COLLECTIVE in span.kernel.lower()].append(Interval(span.start, span.start + span.ns))
    computation, communication = map(joined, split)
    found = {"communication": communication, "computation": computation, "both": both(communication, computation)}
    return {f"{what}_ms": length(times) / 1e6 for what, times in found.items()}


def operators_of(recorded: Any) -> dict[str, tuple[float, int]]:
    """The same for a CPU, each without those it calls."""
    events = (event for event in recorded.key_averages() if not event.is_user_annotation)
    return {e.key: (e.self_cpu_time_total / 1000, e.count) for e in events if e.self_cpu_time_total > 0}


def summary(times: dict[str, tuple[float, int]]) -> dict[str, Any]:
    """times: kernel -> milliseconds and calls of one step."""
    kinds: dict[str, float] = {}
    for kernel, (ms, _) in times.items():
        kinds[kind_of(kernel)] = kinds.get(kind_of(kernel), 0.0) + ms
    longest = sorted(times.items(), key=lambda item: -item[1][0])[:TOP]
    return {
        "busy_ms": sum(kinds.values()),
        "kinds_ms": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "longest": [{"kernel": k, "kind": kind_of(k), "ms": ms, "calls": calls} for k, (ms, calls) in longest],
    }


def lines(name: str, profile: dict[str, Any]) -> list[str]:
    kinds = ", ".join(f"{kind} {ms:.2f}" for kind, ms in profile["kinds_ms"].items())
    out = [f"{name}: a step keeps the device busy for {profile['busy_ms']:.2f} ms: {kinds}"]
    out += [f"  {k['ms']:8.3f} ms {k['calls']:5d} x {k['kind']:<14} {k['kernel'][:110]}" for k in profile["longest"]]
    if profile.get("pauses"):
        out.append(f"{name}: nothing runs for {profile['idle_ms']:.2f} ms of a step")
        out += [
            f"  {p['ms']:8.3f} ms {p['times']:5d} x between {p['after'][:60]} and {p['before'][:60]}"
            for p in profile["pauses"]
        ]
    return out
