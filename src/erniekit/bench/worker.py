"""A workload in a process of its own: `python -m erniekit.bench.worker`, which reads what to do from stdin.

Started by command.py ahead of its turn, so that the slow imports are over when the device is free. It takes several
workloads one after the other as well: tiny ones are done sooner than a process starts.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from erniekit.bench.workloads import WORKLOADS, BenchOptions, Workload, tiny
from erniekit.log import emit


def measure(work: Workload, options: BenchOptions, write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """write: called with the results so far, in case the rest is never reached."""
    import torch

    from erniekit.bench.card import Watch
    from erniekit.bench.data import PictureIds, make_steps
    from erniekit.bench.measure import ProductRate, product_rate
    from erniekit.bench.runner import Task
    from erniekit.bench.turns import Turns
    from erniekit.checkpoint.model_folder import ModelFolder
    from erniekit.devices import pick

    began = time.monotonic()
    machine = pick("cpu" if options.tiny else "auto")
    dtype = torch.bfloat16 if machine.fast_bf16 else torch.float32
    with tempfile.TemporaryDirectory() as name, Watch(machine.smi_id()) as watch:
        gemm = product_rate(machine, dtype, watch)
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(dict(work.model)))
        data = make_steps(work.rows, int(work.model["vocab_size"]), 4, options.seed, PictureIds.of(work.model))
        task = Task(work, options, folder, machine, dtype, data)
        peers = work.peers if options.peers is None else tuple(p for p in work.possible if p in options.peers)
        turns = Turns(task, peers, None if options.seconds is None else began + options.seconds, watch)
        config = ModelFolder(folder, weights=False).config

        def result(gemm: ProductRate) -> dict[str, Any]:
            return _result(work, options, turns, config, gemm, machine, time.monotonic() - began)

        turns.run(lambda: write(result(gemm)))
        return result(gemm.best(product_rate(machine, dtype, watch)))


def _result(
    work: Workload, options: BenchOptions, turns: Any, config: Any, gemm: Any, machine: Any, seconds: float
) -> dict[str, Any]:
    import torch

    from erniekit.bench.flops import useful_flops
    from erniekit.bench.ours import run_config
    from erniekit.bench.parity import compare
    from erniekit.models.costs import FORMULA, mfu

    task, ours = turns.task, turns.lanes[0]
    batch = task.steps[0].batch
    flops = useful_flops(run_config(task), config, batch)
    peak = machine.peak_flops.get(task.dtype)
    runs = []
    for lane in turns.lanes:
        run = lane.record()
        if "step_ms" in run:
            step = run["step_ms"] / 1000
            run["tokens_per_s"] = batch.num_tokens / step
            run["trained_tokens_per_s"] = batch.num_label_tokens / step
            run["pairs_per_s"] = batch.pairs.count / step if batch.pairs is not None else None
            run["pictures_per_s"] = len(batch.vision.grids) / step if batch.vision is not None else None
            run["mfu"] = mfu(flops, step, peak)
            run["of_ceiling"] = flops / step / gemm.held
        if lane is ours:
            run["planned"] = lane.runner.planned
        else:
            run["parity"] = compare(work, ours, lane, task.dtype)
        runs.append(run)
    runs += [{"runner": name, "absent": reason} for name, reason in turns.missing.items()]
    # Toy sizes are all overhead: what is faster there need not be so at any other.
    best = max((r["tokens_per_s"] for r in runs[1:] if "tokens_per_s" in r and not options.tiny), default=None)
    return {
        "workload": work.name,
        "about": work.about,
        "tiny": options.tiny,
        "device": machine.name,
        "torch": torch.__version__,
        "dtype": str(task.dtype).removeprefix("torch."),
        "keys": {**work.keys, **options.keys},
        "tokens": batch.num_tokens,
        "trained_tokens": batch.num_label_tokens,
        "documents": int(len(batch.cu_seqlens) - 1),
        "pictures": len(batch.vision.grids) if batch.vision is not None else None,
        "pairs": batch.pairs.count if batch.pairs is not None else None,
        "busiest_expert": turns.busiest,
        "flops": flops,
        "formula": FORMULA,
        "gemm": gemm.record(),
        "target": work.target,
        "unit": work.unit,
        "limit_gib": work.limit_gib,
        "note": work.note,
        "ratio_to_best_peer": runs[0]["tokens_per_s"] / best if best and "tokens_per_s" in runs[0] else None,
        "runs": runs,
        "profile": turns.profile,
        "seconds": seconds,
    }


def main() -> int:
    """Lines of JSON in, a file of JSON for each; progress goes to stdout."""
    _import()
    code = 0
    for line in sys.stdin:
        order = json.loads(line)
        peers = order["options"].pop("peers")
        options = BenchOptions(**order["options"], peers=None if peers is None else tuple(peers))
        work = WORKLOADS[order["workload"]]
        file = Path(order["file"])
        emit(f"{work.name}: {work.about}" + (f" ({place})" if (place := order.get("place")) else ""))
        try:
            result = measure(tiny(work) if options.tiny else work, options, partial(_write, file))
        except Exception:
            traceback.print_exc()
            code = 1
        else:
            _write(file, {**result, "complete": True})
    return code


def _write(file: Path, result: dict[str, Any]) -> None:
    temporary = file.with_name(f".{file.name}.part")
    temporary.unlink(missing_ok=True)  # of a killed run, or a link, which must not be followed
    temporary.write_text(json.dumps(result, indent=1))
    temporary.replace(file)


def _import() -> None:
    """What takes its time, before there is anything to do."""
    for name in (
        "torch",
        "transformers.models.ernie4_5.modeling_ernie4_5",
        "transformers.models.ernie4_5_moe.modeling_ernie4_5_moe",
        "transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe",
        "transformers.models.llama.modeling_llama",
        "erniekit.bench.turns",
        "erniekit.recipes.dpo",
    ):
        with suppress(ImportError):
            import_module(name)


if __name__ == "__main__":
    sys.exit(main())
