"""Clocks for the kernel benchmarks of this folder: milliseconds on the card, and tables whose failing lines say so."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch


def milliseconds(call: Callable[[], Any], repeats: int = 20, graph: bool = False) -> float:
    """Median time of one call. graph: the kernels alone, replayed."""
    # A capture is warmed up in a stream of its own; elsewhere that would keep a second pool of memory.
    side = torch.cuda.Stream() if graph else torch.cuda.current_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    run, kept = call, None
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            kept = call()
        run = captured.replay
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    del kept
    return median(times)


def queued_milliseconds(call: Callable[[], Any], calls: int = 10) -> float:
    """Median time of a call in a queue of them: launching overlaps with the kernels, as in training."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(marks))


def line(name: str, call: Callable[[], str]) -> None:
    """One line of a table; what fails says so and the rest goes on."""
    try:
        print(f"{name:<58} {call()}", flush=True)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0][:160]
        print(f"{name:<58} FAILED {type(error).__name__}: {first}", flush=True)
    torch.cuda.empty_cache()
