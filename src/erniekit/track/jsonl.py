"""<output_dir>/metrics.jsonl: one object for each logged step and each evaluation. On in every run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from erniekit.files import own, settle
from erniekit.track.atomic import plain, replacing
from erniekit.track.base import Kind, RunInfo, Tracker

FILE = "metrics.jsonl"


class JsonlTracker(Tracker):
    """Floats keep every digit; NaN and infinities are null. Each line is on disk before the next step."""

    name = "jsonl"

    def __init__(self) -> None:
        self._out: TextIO | None = None
        self._run = RunInfo(Path())

    def start(self, run: RunInfo) -> None:
        self._run, path = run, own(run.output_dir / FILE)
        if run.start_step > 0:
            keep_until(path, run.start_step)
        else:
            path.unlink(missing_ok=True)
        self._out = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float], kind: Kind) -> None:
        # The whole-run numbers are no step of the curve: they are in run.json and train_results.json.
        if self._out is None or kind == "end":
            return
        if kind == "eval" and step == self._run.start_step:
            self._forget_evaluation(step)
        record = {"global_step": step, **plain(metrics)}
        self._out.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        self._out.flush()

    def _forget_evaluation(self, step: int) -> None:
        """A resumed run evaluates the step it begins at once more: a checkpoint is written before its evaluation."""
        path = self._run.output_dir / FILE
        self.close()
        _keep(path, lambda record: record["global_step"] != step or not any(k.startswith("eval_") for k in record))
        self._out = path.open("a", encoding="utf-8")

    def close(self) -> None:
        if self._out is not None:
            self._out.close()
            settle(Path(self._out.name))
            self._out = None


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file; a line torn by a kill is passed over."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("global_step"), int):
                yield record


def keep_until(path: Path, step: int) -> None:
    """Drop what a killed run logged after the checkpoint now resumed: those steps will be logged again."""
    _keep(path, lambda record: record["global_step"] <= step)


def _keep(path: Path, selected: Callable[[dict[str, Any]], bool]) -> None:
    if path.is_file():
        with replacing(path) as out:
            for record in filter(selected, read(path)):
                out.write(json.dumps(record, ensure_ascii=False) + "\n")
