"""Times of a step whose layers are launched one by one, and replayed as CUDA graphs, on one NVIDIA card.

python benchmarks/graphs.py
python benchmarks/graphs.py --only pairs
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from device_cases.graphs import ours

from erniekit.bench.ours import Ours
from erniekit.bench.workloads import ERNIE_03B, ERNIE_21B, LORA, Rows

GIB = 2**30


def timed(runner: Ours, count: int) -> float:
    """Milliseconds a step."""
    for number in range(6):
        runner.step(number)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for number in range(6, 6 + count):
        runner.step(number)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count * 1e3


def compared(
    folder: Path,
    what: str,
    model: dict[str, Any],
    rows: Rows,
    steps: int = 20,
    compiled: tuple[bool, ...] = (False,),
    **keys: Any,
) -> None:
    """compiled: whether layers that are launched are, one time each."""
    shown = []
    for graph, compile in [*((False, each) for each in compiled), (True, False)]:
        torch.cuda.reset_peak_memory_stats()
        runner = ours(folder, graph, model, rows, **keys, compile=compile)
        took = timed(runner, steps)
        recorded = len(getattr(runner.built.engine.model.run_layers, "recorded", ()))
        name = f"replayed ({recorded} recorded)" if graph else "launched compiled" if compile else "launched"
        shown.append(f"{name} {took:.1f} ms, {torch.cuda.max_memory_allocated() / GIB:.1f} GiB")
        del runner
        torch.cuda.empty_cache()
    print(f"{what}, {rows.count} x {rows.length} tokens, a step: {'; '.join(shown)}", flush=True)


def experts(folder: Path) -> None:
    for base, length in (("bf16", 4096), ("bf16", 8192), ("fp8", 8192)):
        compared(folder, f"21B-A3B, LoRA, {base}", dict(ERNIE_21B), Rows(1, length), 8, **LORA, frozen_base=base)


def dense(folder: Path) -> None:
    for length, mean in ((512, 0), (2048, 0), (2048, 512), (4096, 0)):
        what = f"documents of {mean}" if mean else "one document"
        compared(folder, f"0.3B, {what}", dict(ERNIE_03B), Rows(1, length, mean=mean))


def pairs(folder: Path) -> None:
    """DPO with a live reference, whose passes are launched either way."""
    for length, count, answer in ((1024, 2, 128), (2048, 2, 256), (8192, 4, 512), (16384, 4, 512)):
        rows = Rows(1, length, pairs=count, answer=answer)
        keys = {"stage": "DPO", "max_prompt_len": length // count}
        compared(folder, f"0.3B, {count} pairs", dict(ERNIE_03B), rows, compiled=(False, True), **keys)
    rows, keys = Rows(1, 2048, pairs=2, answer=256), {**LORA, "stage": "DPO", "max_prompt_len": 1024}
    compared(folder, "0.3B, LoRA, 2 pairs", dict(ERNIE_03B), rows, compiled=(False, True), **keys)


TABLES: dict[str, Callable[[Path], None]] = {"experts": experts, "dense": dense, "pairs": pairs}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TABLES, action="append", help="may be given several times")
    chosen = parser.parse_args().only or list(TABLES)
    with tempfile.TemporaryDirectory() as made:
        for each in chosen:
            TABLES[each](Path(made))
