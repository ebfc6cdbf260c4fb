"""<output_dir>/run.json: the whole record of a run for machines and for report.html. The recipes keep it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from erniekit.files import own, settle
from erniekit.log import is_main_rank, without_secrets
from erniekit.track.atomic import plain, write_text
from erniekit.track.base import Kind, RunInfo, Tracker

FILE = "run.json"
FORMAT = 1
MAX_EVENTS = 1000  # the newest; each event rewrites the file, which must stay small


class RunRecord(Tracker):
    """A tracker too: handed to make_trackers it receives every event and the last numbers of the run.

    Rewritten (whole or not at all) at start, at every event, on `describe` and at the end; not on `log`. Nothing is
    written before `describe` or `start`: a command that is refused leaves the file of an earlier run as it is.
    """

    name = "run.json"

    def __init__(self, output_dir: str | Path, *, command: Sequence[str] | str, version: str) -> None:
        self.path = Path(output_dir) / FILE
        before = read(output_dir)  # kept on a resume, dropped by start() on a fresh run
        self._inherited = len(before.get("events", []))
        self._begun = self._ended = False
        self._record: dict[str, Any] = {
            "format": FORMAT,
            "command": command if isinstance(command, str) else shlex.join(without_secrets(command)),
            "version": version,
            "status": "running",
            "started": before.get("started", _now()),
            "updated": _now(),
            "total_steps": 0,
            "start_step": 0,
            "config": [],
            "notes": [],
            "environment": {},
            "data": {},
            "coverage": [],
            "kernels": [],
            "events": before.get("events", []),
            "events_dropped": before.get("events_dropped", 0),
            "latest": {},
            "metrics": {},
            "next_commands": [],
        }

    def describe(
        self,
        *,
        config: Sequence[Mapping[str, Any]] | None = None,
        notes: Sequence[Any] | None = None,
        environment: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        coverage: Any = None,
        kernels: Sequence[Mapping[str, str]] | None = None,
        checks: Sequence[Mapping[str, str]] | None = None,
        start_seconds: Mapping[str, float] | None = None,
        next_commands: Sequence[str] | None = None,
    ) -> None:
        """Set what is given. `config`: {key, value, origin}; `notes`: text or {key, old, new, reason}; `start_seconds`:
        of each part of the preparation."""
        given = dict(
            config=config,
            notes=notes,
            environment=environment,
            data=data,
            coverage=coverage,
            kernels=kernels,
            checks=checks,
            start_seconds=start_seconds,
            next_commands=next_commands,
        )
        self._record.update({name: plain(part) for name, part in given.items() if part is not None})
        self._begin()
        self._write()

    def start(self, run: RunInfo) -> None:
        """A resumed run keeps the start time and the events of the runs before it; they did happen."""
        if not run.start_step:
            del self._record["events"][: self._inherited]
            self._inherited = 0
            self._record.update(started=_now(), events_dropped=0)
        self._record.update(total_steps=run.total_steps, start_step=run.start_step)
        self._begin()
        self._write()

    def log(self, step: int, metrics: Mapping[str, float], kind: Kind) -> None:
        if kind == "end":
            self._record["metrics"].update(plain(metrics))
            self._write()
        else:
            self._record["latest"][kind] = {"global_step": step, **plain(metrics)}

    def event(self, step: int, name: str, text: str = "") -> None:
        events = self._record["events"]
        events.append({"time": _now(), "step": step, "name": name, "text": text})
        excess = max(0, len(events) - MAX_EVENTS)
        del events[:excess]
        self._inherited = max(0, self._inherited - excess)
        self._record["events_dropped"] += excess
        self._write()

    def finish(
        self,
        status: str = "finished",
        metrics: Mapping[str, Any] | None = None,
        next_commands: Sequence[str] | None = None,
    ) -> None:
        """The end, whichever it is: finished, stopped (a signal, early stop) or failed."""
        self._record["status"] = status
        self._record["finished"] = _now()
        self._record["metrics"].update(plain(metrics or {}))
        if next_commands is not None:
            self._record["next_commands"] = list(next_commands)
        self._ended = True
        self._write()

    def close(self) -> None:
        if self._record["status"] == "running":
            self.finish("finished" if self._record["metrics"] else "stopped")

    def _begin(self) -> None:
        if not self._begun and is_main_rank():
            own(self.path)
        self._begun = True

    def _write(self) -> None:
        if self._begun and is_main_rank():
            self._record["updated"] = _now()
            write_text(self.path, record_text(self._record))
            if self._ended:
                settle(self.path)


def record_text(record: dict[str, Any]) -> str:
    """JSON with one line for each key of the config, each event, ...: written at every save, and json's own indenting
    takes five times as long."""
    parts = []
    for name, value in plain(record).items():
        text = _json(value)
        if isinstance(value, list) and value:
            text = "[\n    " + ",\n    ".join(map(_json, value)) + "\n  ]"
        elif isinstance(value, dict) and value:
            text = "{\n    " + ",\n    ".join(f"{_json(key)}: {_json(item)}" for key, item in value.items()) + "\n  }"
        parts.append(f"  {_json(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def read(output_dir: str | Path) -> dict[str, Any]:
    """The run.json of a folder; empty when there is none or it is no JSON object."""
    try:
        record = json.loads((Path(output_dir) / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
