"""Times of a step whose layers are launched one by one, and replayed as CUDA graphs, on one NVIDIA card.

python benchmarks/graphs.py
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from device_cases.graphs import ours

from erniekit.bench.ours import Ours
from erniekit.bench.workloads import ERNIE_03B, ERNIE_21B, LORA, Rows


def timed(runner: Ours, count: int = 20) -> float:
    for number in range(6):
        runner.step(number)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for number in range(6, 6 + count):
        runner.step(number)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count * 1e3


def table(folder: Path) -> None:
    for base, length in (("bf16", 4096), ("bf16", 8192), ("fp8", 8192)):
        each = []
        for graph in (False, True):
            runner = ours(folder, graph, dict(ERNIE_21B), Rows(1, length), **LORA, frozen_base=base)
            each.append(timed(runner, 8))
            peak = torch.cuda.max_memory_allocated() / 2**30
            del runner
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        print(f"21B-A3B, LoRA, {base}, {length} tokens: launched {each[0]:.1f} ms a step, replayed {each[1]:.1f}, "
              f"{peak:.1f} GiB", flush=True)  # fmt: skip
    for length, mean in ((512, 0), (2048, 0), (2048, 512), (4096, 0)):
        each = []
        for graph in (False, True):
            runner = ours(folder, graph, dict(ERNIE_03B), Rows(1, length, mean=mean))
            each.append(timed(runner))
            del runner
            torch.cuda.empty_cache()
        what = f"documents of {mean}" if mean else "one document"
        print(f"0.3B, {length} tokens, {what}: launched {each[0]:.1f} ms a step, replayed {each[1]:.1f}", flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as made:
        table(Path(made))
