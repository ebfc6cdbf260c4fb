"""Where a step's device time goes: by kind of kernel, and the longest kernels by name. Called by turns.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

# The first that matches a kernel's name, in lower case.
KINDS = (
    ("attention", r"flash|fmha|sdpa|attention|_attn|varlen|cudnn::fusion"),
    ("experts' rows", r"^_(?:take|activate|activate_backward|sum_choices|outer|add_low|product)$"),
    ("positions and swiglu", r"^(?:turn|forward|backward)(?:_\d+)?$"),
    ("grouped", r"grouped|group_gemm|groupproblem|expert.*mm"),
    ("loss and softmax", r"^_rows$|cross_entropy|token_loss|nll|^(?!triton_).*softmax"),
    ("optimizer", r"^(?:update|squares)$|adam|multi_tensor|foreach|lpnorm"),
    ("element-wise", r"^triton_(?:poi|red|per|for)_"),  # what the compiler fused, whatever its name lists
    ("gemm", r"gemm|cutlass|cublas|nvjet|xmma|wgmma|splitk|addmm|\bb?mm\b|matmul|gemv|linear|^triton_tem_"),
    ("copy", r"memcpy|memset|copy"),
    ("sort and index", r"sort|radix|scan|index|gather|scatter|topk|histogram"),
    ("element-wise", r"elementwise|reduce|vectorized|fused|norm|rope|swiglu|silu|mul|add"),
)
TOP = 15


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")


def profile_steps(
    step: Callable[[int], Any], first: int, count: int, device: torch.device, before: int = 0
) -> dict[str, Any]:
    """before: so many steps run right ahead, for a card's clocks fall in a long run and its kernels take longer."""
    from torch.profiler import ProfilerActivity, profile

    card = device.type == "cuda"
    for number in range(first, first + before):
        step(number)
    first += before
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if card else [])]
    with profile(activities=activities) as recorded:
        for number in range(first, first + count):
            step(number)
        if card:
            torch.cuda.synchronize()
    times: dict[str, tuple[float, int]] = {}
    for event in recorded.key_averages():
        if card and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        if getattr(event, "is_user_annotation", False):  # a name around kernels that are counted themselves
            continue
        spent = event.self_device_time_total if card else event.self_cpu_time_total
        if spent > 0:
            times[event.key] = (spent / 1000 / count, event.count // count or 1)
    return summary(times)


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
    return out
