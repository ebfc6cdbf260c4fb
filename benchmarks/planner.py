"""Predicted against measured on the card at hand: peak memory and step time of short runs, each in its own process.

    python benchmarks/planner.py --output planner-check [--seconds 360] [--limit 120] [--only C1,B1] [--known FILE]
    python benchmarks/planner.py --table benchmarks/planner_h200.json    # no card: what this version plans of records

Runs go through the code of `erniekit bench`. The most informative come first; OUTPUT/planner.json (records) and
OUTPUT/planner.md (the table) are written after each. What is in OUTPUT/planner.json or in --known already is not run
again, so the same command goes on where it was stopped. --seconds: of all runs together; --limit: of one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from erniekit.bench.command import AHEAD, Worker
from erniekit.bench.planned import Record, as_file, error_of, error_table, read_records, record_of
from erniekit.bench.workloads import WORKLOADS, BenchOptions

LEAST = 30.0  # seconds: a run is not begun with less
MEASURED = "benchmarks/planner.py"  # how `source` of a record begins that was made here


@dataclass(frozen=True)
class Check:
    name: str
    workload: str
    keys: Mapping[str, Any] = field(default_factory=dict)  # over the workload's
    steps: int = 4
    warmup: int = 2


WHOLE = {"recompute": True, "recompute_granularity": "full"}
NONE = {"recompute": False}
LONG: dict[str, int] = {"steps": 2, "warmup": 1}  # a step takes many seconds
# Each kind of model, method and length once, then the levers on each, then what is near to a run before it.
CHECKS = (
    Check("C1-85", "C1-85"),
    Check("C2-45", "C2-45"),
    Check("A1", "A1", steps=8),
    Check("F1", "F1"),
    Check("E1", "E1"),
    Check("C1-again", "C1-85", WHOLE),
    Check("A1-again", "A1", WHOLE, steps=8),
    Check("C3", "C3", steps=3),
    Check("E2-live", "E2-live"),
    Check("B1-100", "B1-100", **LONG),
    Check("C2-32", "C2-32"),
    Check("A2-none", "A2-none"),
    Check("F1-again", "F1", WHOLE),
    Check("C2-32k", "C2-32k", steps=3),
    Check("B1-30", "B1-30", **LONG),
    Check("C2-128k", "C2-128k", **LONG),
    Check("A1b", "A1b"),
    Check("C1-60", "C1-60"),
    Check("F1b", "F1b"),
    Check("A2-half", "A2-half"),
    Check("C2-dpo", "C2-dpo", steps=3),
    Check("E1-again", "E1", WHOLE),
    Check("A1-lora", "A1", {"fine_tuning": "LoRA", "lora_rank": 32}, steps=8),
    Check("C2-again", "C2-45", WHOLE),
    Check("D1-exact", "D1-exact"),
)


def main() -> int:
    given = _parser().parse_args()
    if given.table:
        print("\n".join(error_table(read_records(given.table))))
        return 0
    given.output.mkdir(parents=True, exist_ok=True)
    file = given.output / "planner.json"
    records = read_records(file) if file.is_file() else []
    for known in given.known:
        names = {record.name for record in records}
        records += [r for r in read_records(known) if r.source.startswith(MEASURED) and r.name not in names]
    done = {record.name for record in records}
    words = [word for word in given.only.split(",") if word]
    wanted = [c for c in CHECKS if c.name not in done and (not words or any(c.name.startswith(w) for w in words))]
    failed = measure(wanted, given, records, file)
    print("\n".join(error_table(records)))
    if failed:
        print(f"no result: {', '.join(failed)}")
    return 1 if failed else 0


def measure(wanted: list[Check], given: argparse.Namespace, records: list[Record], file: Path) -> list[str]:
    """Adds to records; the names of runs that gave none."""
    began, failed = time.monotonic(), []
    waiting: Worker | None = None
    try:
        for number, check in enumerate(wanted):
            left = given.seconds - (time.monotonic() - began) if given.seconds else given.limit
            if left < LEAST:
                failed += [c.name for c in wanted[number:]]
                print(f"time limit: {len(wanted) - number} not begun")
                break
            worker = waiting or Worker()
            waiting = Worker() if (os.cpu_count() or 1) >= AHEAD and number + 1 < len(wanted) else None
            record = _run(check, worker, given, min(left, given.limit))
            if record is None:
                failed.append(check.name)
                print(f"{check.name}: no result", flush=True)
                continue
            records.append(record)
            _write(file, as_file(records))
            _write(file.with_suffix(".md"), "\n".join(error_table(records)) + "\n")
            e = error_of(record)
            print(
                f"{check.name}: {record.peak_gib:.2f} GiB, planned {e.gib:.2f} ({e.memory:+.1%}); "
                f"{record.step_ms:.1f} ms, planned {e.ms:.1f} ({e.time:+.1%}); {time.monotonic() - began:.0f} s",
                flush=True,
            )
    finally:
        if waiting is not None:
            waiting.end()
    return failed


def _run(check: Check, worker: Worker, given: argparse.Namespace, seconds: float) -> Record | None:
    """Its whole result stays beside the records: parts of the plan, clocks, every step's time."""
    work, folder = WORKLOADS[check.workload], given.output / check.name
    folder.mkdir(exist_ok=True)
    options = BenchOptions((), check.steps, check.warmup, given.tiny, keys=check.keys)
    worker.run([work], options, folder, seconds)
    result = folder / f"{work.name}.json"
    return record_of(check.name, work, check.keys, json.loads(result.read_text())) if result.is_file() else None


def _write(file: Path, text: str) -> None:
    part = file.with_name(f".{file.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("planner-check"))
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--limit", type=float, default=150.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--known", type=Path, nargs="*", default=[])
    parser.add_argument("--table", type=Path)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU: whether everything runs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
