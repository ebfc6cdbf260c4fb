"""The runs of a page: the list, each run's curves out of metrics.jsonl as it grows, and runs side by side.

Called by the pages every few seconds; a file is read from where the last reading ended.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from erniekit.errors import ErnieKitError
from erniekit.webui import forms
from erniekit.webui.jobs import JobError, Jobs, WebJob
from erniekit.webui.run_folders import METRICS, FolderKind, RunFolders, kind_of
from erniekit.webui.run_names import RunNames

RECENT = 20  # logged steps whose mean rate gives the time left
RESUMABLE = ("stopped", "failed", "lost")
MAX_POINTS = 1000  # of a series handed to a page: more than its pixels
_CHUNK = 8 * 2**20  # bytes read at once


@dataclass
class MetricSeries:
    """One metric: finite values by step."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float | None:
        return self.values[-1] if self.values else None


@dataclass(frozen=True)
class RunRow:
    """One line of the runs list."""

    id: str
    command: str
    owner: str
    state: str
    created: float
    stage: str
    model: str
    step: int
    total_steps: int  # 0: not known yet
    loss: float | None
    eval_loss: float | None
    tokens_per_second: float | None
    seconds: float  # from the start to the end, or to now
    output_dir: str
    name: str = ""  # given by a person; empty: none
    seconds_left: float | None = None  # until a running training ends
    is_job: bool = True  # started by the page; else found in a folder
    kind: FolderKind = field(default_factory=FolderKind)  # of a training's result

    @property
    def can_resume(self) -> bool:
        return self.command == "train" and self.state in RESUMABLE

    @property
    def progress(self) -> float:
        """From 0 to 1."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else 0.0


@dataclass(frozen=True)
class Compared:
    """One metric of several runs on the steps that any of them has, and the settings in which they differ."""

    metric: str
    steps: list[int]
    values: dict[str, list[float | None]]  # run -> a value for every step; None where it has none
    differences: dict[str, dict[str, Any]]  # key -> run -> value


class MetricsReader:
    """The metrics of one file, read as it grows; starts over when the file was replaced (a resumed run cuts it)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.series: dict[str, MetricSeries] = {}
        self._at, self._inode = 0, -1

    def read(self) -> dict[str, MetricSeries]:
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._at:
                    self.series, self._at, self._inode = {}, 0, status.st_ino
                file.seek(self._at)
                while part := file.read(_CHUNK):
                    complete = part.rfind(b"\n") + 1  # the rest is a line that is still being written
                    if not complete:
                        break
                    self._at += complete
                    file.seek(self._at)
                    for line in part[:complete].splitlines():
                        self._add(line)
        except OSError:
            self.series, self._at, self._inode = {}, 0, -1
        return self.series

    def _add(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except ValueError:
            return
        step = record.get("global_step") if isinstance(record, dict) else None
        if not isinstance(step, int):
            return
        for name, value in record.items():
            numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
            if name != "global_step" and numeric and math.isfinite(value):
                series = self.series.setdefault(name, MetricSeries())
                series.steps.append(step)
                series.values.append(float(value))


class Runs:
    """The runs of a page - its own jobs, and run folders that no job has started; safe to call from several threads."""

    def __init__(self, jobs: Jobs, folders: RunFolders | None = None) -> None:
        self.jobs = jobs
        self.folders = folders or RunFolders(())
        self.names = RunNames(jobs.root)
        self._readers: dict[str, MetricsReader] = {}
        self._recipes: dict[str, tuple[int, dict[str, Any]]] = {}  # recipes by job, as of their time of change
        self._lock = threading.Lock()

    def series(self, id: str, limit: int = MAX_POINTS) -> dict[str, MetricSeries]:
        """Every metric of a run so far, at most `limit` points each: loss, learning_rate, tokens_per_second, ..."""
        return {name: thinned(series, limit) for name, series in self._metrics(self.get(id)).items()}

    def get(self, id: str) -> WebJob:
        """A job of the page, or a run that was found in a folder; the latter has no folder of a job."""
        return self.folders.get(id) or self.jobs.get(id)

    def rows(self, owner: str | None = None, commands: Iterable[str] = ("train",)) -> list[RunRow]:
        """The runs list, newest first; runs found in folders have no owner, so `owner` leaves them out."""
        wanted, jobs = set(commands), self.jobs.list(owner)
        if owner is None and "train" in wanted:
            known = {job.output_dir for job in jobs if job.command == "train"}
            jobs = sorted([*jobs, *self.folders.list(known)], key=lambda job: -job.created)
        names = self.names.all()
        return [self._row(job, names) for job in jobs if job.command in wanted]

    def row(self, id: str) -> RunRow:
        return self._row(self.get(id), self.names.all())

    def rename(self, id: str, name: str) -> str:
        return self.names.rename(_name_key(self.get(id)), name)

    def recipe(self, id: str) -> dict[str, Any]:
        """The keys a run was given."""
        return dict(self._recipe_values(self.get(id)))

    def resume(self, id: str, owner: str = "") -> WebJob:
        """Continue a run from its newest checkpoint; one found in a folder becomes a job with the same recipe."""
        job = self.get(id)
        if job.folder:
            return self.jobs.resume(id)
        if job.is_running:
            raise JobError("this run is still running", where=job.output_dir, fix="stop it first")
        values = {**self._recipe_values(job), "output_dir": job.output_dir}
        values.pop("overwrite_output_dir", None)  # it would start from the beginning
        return self.jobs.start("train", forms.to_yaml(values, forms.page_of("train", values)), owner)

    def results(self, id: str) -> dict[str, Any]:
        """The numbers a finished job of `train` or `eval` left: all_results.json; empty before."""
        return _json(Path(self.get(id).output_dir) / "all_results.json")

    def compare(self, ids: Sequence[str], metric: str = "loss", limit: int = MAX_POINTS) -> Compared:
        jobs = [self.get(id) for id in dict.fromkeys(ids)]
        curves = {job.id: thinned(self._metrics(job).get(metric, MetricSeries()), limit) for job in jobs}
        steps = sorted({step for series in curves.values() for step in series.steps})
        values: dict[str, list[float | None]] = {}
        for id, series in curves.items():
            at = dict(zip(series.steps, series.values))
            values[id] = [at.get(step) for step in steps]
        return Compared(metric, steps, values, differences({job.id: self._recipe_values(job) for job in jobs}))

    def _metrics(self, job: WebJob) -> dict[str, MetricSeries]:
        if not job.output_dir:
            return {}
        path = Path(job.output_dir) / METRICS
        with self._lock:
            reader = self._readers.setdefault(str(path), MetricsReader(path))
            return {name: MetricSeries([*s.steps], [*s.values]) for name, s in reader.read().items()}

    def _recipe_values(self, job: WebJob) -> dict[str, Any]:
        if not job.folder:
            return self.folders.recipe(job.output_dir)
        try:
            changed = job.recipe.stat().st_mtime_ns
            cached = self._recipes.get(job.id)
            if cached is None or cached[0] != changed:
                cached = self._recipes[job.id] = changed, forms.from_yaml(job.recipe.read_text(encoding="utf-8"))
            return cached[1]
        except (OSError, ErnieKitError):
            return {}

    def _row(self, job: WebJob, names: dict[str, str]) -> RunRow:
        metrics, recipe = self._metrics(job), self._recipe_values(job)
        run_record = self.folders.run_record(Path(job.output_dir)) if job.output_dir else {}
        loss = metrics.get("loss", MetricSeries())
        step = loss.steps[-1] if loss.steps else 0
        total = run_record.get("total_steps", 0)
        total = total if isinstance(total, int) else 0

        def last(name: str) -> float | None:
            return metrics.get(name, MetricSeries()).last

        return RunRow(
            id=job.id,
            command=job.command,
            owner=job.owner,
            state=job.state,
            created=job.created,
            stage=str(recipe.get("stage", "")) or (str(forms.default_of("stage")) if job.command == "train" else ""),
            model=Path(str(recipe.get("model_name_or_path") or "")).name,
            step=step,
            total_steps=total,
            loss=loss.last,
            eval_loss=last("eval_loss"),
            tokens_per_second=last("tokens_per_second"),
            seconds=max(0.0, (job.ended or time.time()) - job.began),
            output_dir=job.output_dir,
            name=names.get(_name_key(job), ""),
            seconds_left=time_left(metrics, step, total) if job.is_running and job.command == "train" else None,
            is_job=bool(job.folder),
            kind=kind_of(job.output_dir) if job.command == "train" and job.output_dir else FolderKind(),
        )


def _name_key(job: WebJob) -> str:
    return job.output_dir if job.command == "train" and job.output_dir else job.id


def time_left(metrics: Mapping[str, MetricSeries], step: int, total: int) -> float | None:
    """Seconds for the steps that remain, at the mean rate of the last ones; None before the first is logged."""
    rates = [rate for rate in metrics.get("interval_steps_per_second", MetricSeries()).values[-RECENT:] if rate > 0]
    if not rates or total <= step:
        return None
    return (total - step) * sum(1 / rate for rate in rates) / len(rates)


def thinned(series: MetricSeries, limit: int = MAX_POINTS) -> MetricSeries:
    """At most `limit` points: first, last, and the lowest and highest of each stretch between: no spike is lost."""
    count = len(series)
    if count <= max(limit, 4):
        return series
    stretches, inner = (max(limit, 4) - 2) // 2, count - 2
    keep = [0]
    for n in range(stretches):
        part = range(1 + n * inner // stretches, 1 + (n + 1) * inner // stretches)
        low, high = min(part, key=series.values.__getitem__), max(part, key=series.values.__getitem__)
        keep += sorted({low, high})
    keep.append(count - 1)
    return MetricSeries([series.steps[i] for i in keep], [series.values[i] for i in keep])


def differences(recipes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The keys that are not the same in all recipes, with the value of each run (its default where not given)."""
    names = dict.fromkeys(name for values in recipes.values() for name in values)
    out = {}
    for name in names:
        row = {id: values.get(name, forms.default_of(name)) for id, values in recipes.items()}
        if len({json.dumps(value, sort_keys=True, default=str) for value in row.values()}) > 1:
            out[name] = row
    return out


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
