"""One rank of `erniekit train`, with the kernels of some of its steps written down: RECIPE OUTPUT; ranks by variables.

Started by ranks.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from erniekit.bench.profile import KernelSpan, overlap
from erniekit.cli.main import main
from erniekit.train.metrics import LogHook

OVERLAP = ".overlap"  # of the file beside the kernels
FIRST, COUNT = 3, 2  # steps that are recorded, once the compiler is done


def launches_of(recorder: Any, trace: Path) -> list[dict[str, Any]]:
    recorder.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    trace.unlink()
    return [event for event in events if event.get("cat") == "kernel"]


def kernels_of(launches: list[dict[str, Any]]) -> list[tuple[str, list[float]]]:
    """Name and grid of each kernel, and the microseconds of its launches."""
    found: dict[str, list[float]] = {}
    for event in launches:
        found.setdefault(f"{event['name']}|{event['args'].get('grid')}", []).append(event["dur"])
    return list(found.items())


def overlap_of(launches: list[dict[str, Any]]) -> dict[str, float]:
    return overlap(KernelSpan(e["name"], round(1000 * e["ts"]), round(1000 * e["dur"])) for e in launches)


def watched(recorded: Path) -> None:
    """Record from the launch of step FIRST on."""
    from torch.profiler import ProfilerActivity, profile

    recorder, state = profile(activities=[ProfilerActivity.CUDA]), {"launched": 0}
    plain = LogHook.launched

    def launched(hook: Any, trainer: Any, step: Any) -> None:
        plain(hook, trainer, step)
        state["launched"] += 1
        if state["launched"] == FIRST - 1:
            torch.cuda.synchronize()
            recorder.start()
        elif state["launched"] == FIRST - 1 + COUNT:
            torch.cuda.synchronize()
            recorder.stop()
            launches = launches_of(recorder, recorded.with_suffix(".trace"))
            recorded.write_text(json.dumps(kernels_of(launches)))
            recorded.with_suffix(OVERLAP).write_text(json.dumps(overlap_of(launches)))

    LogHook.launched = launched  # type: ignore[method-assign]


if __name__ == "__main__":
    recipe, output = sys.argv[1:]
    watched(Path(output))
    sys.exit(main(["train", recipe]))
