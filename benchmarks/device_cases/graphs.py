"""A run whose layers are launched one by one, or replayed as CUDA graphs."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from erniekit.bench.data import make_steps
from erniekit.bench.ours import Ours
from erniekit.bench.runner import Task
from erniekit.bench.workloads import FULL, BenchOptions, Rows, Workload
from erniekit.devices import pick


def ours(folder: Path, graph: bool, model: dict, rows: Rows, **keys: object) -> Ours:
    work = Workload("graph", "", model, rows, {**FULL, "cuda_graph": graph, **keys}, ())
    (folder / "config.json").write_text(json.dumps(model))
    data = make_steps(rows, int(model["vocab_size"]), 4, 0)
    runner = Ours(Task(work, BenchOptions(), folder, pick("gpu"), torch.bfloat16, data))
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()  # of other tests: recording asks whether two steps' activations fit
    runner.build()
    return runner
