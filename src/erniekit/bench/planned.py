"""What the planner expects of a workload, and what was measured of it: in results, and in the table of records.

Called by ours.py while a workload is built, and by benchmarks/planner.py and tests for runs that were recorded.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from erniekit.bench.recipe import run_keys
from erniekit.bench.workloads import WORKLOADS, Workload
from erniekit.config import load
from erniekit.data.types import Batch
from erniekit.errors import ErnieKitError
from erniekit.parallel.layout import Layout
from erniekit.planner.cards import CARDS, rates_of
from erniekit.planner.device_pool import DevicePool
from erniekit.planner.evaluate import Candidate, evaluate
from erniekit.planner.job import Job
from erniekit.planner.memory import GIB
from erniekit.printable import counted
from erniekit.recipes import plan_check
from erniekit.recipes.planning import job_of, shape_of
from erniekit.recipes.run_plan import RunPlan

FORMAT = "erniekit-planner-records-1"
LOW, HIGH, TIME = 0.02, 0.05, 0.10  # how far a plan may be below and above a peak, and off a step's time


@dataclass(frozen=True)
class Facts:
    """Facts of a run that are not there before it begins."""

    again: int  # layers computed again, as the run decided
    document: float  # tokens of a document, each token's own counted
    trained: float  # share of tokens with a label


@dataclass(frozen=True)
class Record:
    """One run that was measured on a card."""

    name: str
    workload: str
    facts: Facts
    peak_gib: float
    step_ms: float
    keys: Mapping[str, Any] = field(default_factory=dict)  # over the workload's
    source: str = ""  # what measured it


def facts_of(plan: RunPlan, batch: Batch) -> Facts:
    memory, layers = plan.config.memory, plan.folder.config.num_layers
    again = layers - len(memory.no_recompute_layers or ()) if memory.recompute else 0
    return Facts(again, batch.sum_squares / batch.num_tokens, batch.num_label_tokens / batch.num_tokens)


def planned(plan: RunPlan, batch: Batch) -> dict[str, Any] | None:
    """Of a run that was decided; None where no plan can be made, as a benchmark goes on without."""
    try:
        facts, layout = facts_of(plan, batch), plan.world.layout
        job = _with(plan_check.job_at_hand(plan.config, plan, layout), facts)
        made = evaluate(job, layout, replace(plan_check.pool_of(plan.device, 1), limit=float("inf")), exact=True)
    except (ErnieKitError, ArithmeticError, LookupError, TypeError, ValueError):
        return None
    parts = {name: round(gib, 3) for name, gib in made.most.shown().items() if gib}
    return {**asdict(facts), "gib": made.most.allocated / GIB, "step_ms": 1000 * made.seconds, "parts": parts}


def _with(job: Job, facts: Facts) -> Job:
    whole = job.recompute in ("", "auto", "full")  # else a part of every layer is computed again
    again = facts.again if whole else job.recomputed
    return replace(job, document=round(facts.document), trained=facts.trained, recomputed=again)


def plan_of(record: Record, card: str = "h200", **kernels: str) -> Candidate:
    """As this version plans it, on no device at all. kernels: of Job, where the record had others."""
    work = WORKLOADS[record.workload]
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(dict(work.model)))
        keys = run_keys(work, Path(name), "bf16", record.keys)
        cfg = load([f"{key}={value}" for key, value in keys.items()], "train")
        job = replace(job_of(cfg, shape_of(cfg), work.rows.count), **kernels)  # type: ignore[arg-type]
    pool = DevicePool(CARDS[card], rates_of(CARDS[card]), 1, limit=float("inf"))
    return evaluate(_with(job, record.facts), Layout(), pool, exact=True)


def record_of(name: str, work: Workload, keys: Mapping[str, Any], result: Mapping[str, Any]) -> Record | None:
    """From a workload's result; None: it has no step, no peak or no plan."""
    ours = result["runs"][0]
    plan = ours.get("planned")
    if not plan or not ours.get("step_ms") or not ours.get("peak_gib"):
        return None
    facts = Facts(plan["again"], plan["document"], plan["trained"])
    source = f"benchmarks/planner.py on {result['device']}, torch {result['torch']}"
    return Record(name, work.name, facts, ours["peak_gib"], ours["step_ms"], dict(keys), source)


def read_records(file: Path) -> list[Record]:
    found = json.loads(file.read_text(encoding="utf-8"))
    if found.get("format") != FORMAT:
        raise ValueError(f"{file} is not a file of recorded runs")
    return [Record(**{**row, "facts": Facts(**row["facts"])}) for row in found["runs"]]


def as_file(records: Iterable[Record]) -> str:
    return json.dumps({"format": FORMAT, "runs": [asdict(record) for record in records]}, indent=1) + "\n"


@dataclass(frozen=True)
class Error:
    """A plan against its record: how far off, as shares."""

    record: Record
    gib: float
    ms: float

    @property
    def memory(self) -> float:
        return self.gib / self.record.peak_gib - 1

    @property
    def time(self) -> float:
        return self.ms / self.record.step_ms - 1

    @property
    def within(self) -> bool:
        return -LOW <= self.memory <= HIGH and abs(self.time) <= TIME


def error_of(record: Record) -> Error:
    made = plan_of(record)
    return Error(record, made.most.allocated / GIB, 1000 * made.seconds)


def error_table(records: Iterable[Record]) -> list[str]:
    """Markdown, as docs/planner.md has it."""
    out = ["| run | GiB recorded | planned | | ms recorded | planned | |", "|---|---|---|---|---|---|---|"]
    for record in records:
        e, again = error_of(record), record.facts.again
        name = record.name + (f" ({counted(again, 'layer')} again)" if again else "")
        out.append(
            f"| {name} | {record.peak_gib:.1f} | {e.gib:.1f} | {e.memory:+.1%} | {_ms(record.step_ms)} | {_ms(e.ms)} "
            f"| {e.time:+.1%} |"
        )
    return out


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"
