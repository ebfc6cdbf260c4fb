"""Run folders: training runs in the folders of the page that no job of the page has started, read from their run.json.

Used by runs.py. The walk is bounded in depth and count and repeated at most every few seconds: a root may be a home
directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from erniekit.config.flat import KEYS
from erniekit.webui.contents import ADAPTER_CONFIGS
from erniekit.webui.jobs import State, WebJob

RUN_FILE, METRICS = "run.json", "metrics.jsonl"
MAX_DEPTH = 5  # folders below one that is searched
MAX_FOLDERS = 5000  # visited below each folder that is searched
MAX_RUNS = 500
MAX_RUN_FILE = 20 * 2**20  # bytes of a run.json
SEARCH_S = 10.0  # between two walks
SILENT_S = 120.0  # without a new line of metrics a run of another terminal counts as ended
SKIPPED = {"node_modules", "__pycache__", "site-packages"}
# Origins of a value in run.json that its recipe did not give.
NOT_GIVEN = ("default", "derived")

_ID = re.compile(r"run-[0-9a-f]{16}")
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_STATES: dict[str, State] = {"finished": "ended", "stopped": "stopped", "failed": "failed"}


@dataclass(frozen=True)
class FolderKind:
    """What a result folder can be used for."""

    adapter: bool = False
    weights: bool = False
    base: str = ""  # that an adapter names


class RunFolders:
    """`folders`: where to search, each below the roots of the page."""

    def __init__(self, folders: Sequence[Path], search_s: float = SEARCH_S) -> None:
        self.folders = tuple(dict.fromkeys(folders))
        self.search_s = search_s
        self._runs: dict[str, Path] = {}
        self._records: dict[Path, tuple[int, dict[str, Any]]] = {}
        self._at = -1e9
        self._lock = threading.Lock()

    def list(self, known: Collection[str] = ()) -> list[WebJob]:
        """Every run found, as a job without a process; those whose folder is in `known` are left out."""
        return [job for id, path in self._paths().items() if str(path) not in known and (job := self._job(id, path))]

    def get(self, id: str) -> WebJob | None:
        if not isinstance(id, str) or not _ID.fullmatch(id):
            return None
        path = self._paths().get(id)
        return self._job(id, path) if path else None

    def recipe(self, output_dir: str) -> dict[str, Any]:
        """The keys that the run was given, by its run.json."""
        config = self.run_record(Path(output_dir)).get("config")
        rows = [row for row in config if isinstance(row, dict)] if isinstance(config, list) else []
        given = {str(row.get("key")): row.get("value") for row in rows if row.get("origin") not in NOT_GIVEN}
        return {name: value for name, value in given.items() if name in KEYS and value is not None}

    def run_record(self, folder: Path) -> dict[str, Any]:
        """run.json, parsed again only when it has changed."""
        path = folder / RUN_FILE
        try:
            status = path.stat()
            cached = self._records.get(folder)
            if cached is None or cached[0] != status.st_mtime_ns:
                if status.st_size > MAX_RUN_FILE:
                    return {}
                read = json.loads(path.read_text(encoding="utf-8"))
                cached = self._records[folder] = status.st_mtime_ns, read if isinstance(read, dict) else {}
            return cached[1]
        except (OSError, ValueError, RecursionError):
            return {}

    def _paths(self) -> dict[str, Path]:
        with self._lock:
            if time.monotonic() - self._at > self.search_s:
                runs = [path for folder in self.folders for path in _search(folder)]
                self._runs = {run_id(path): path for path in runs[:MAX_RUNS]}
                self._at = time.monotonic()
            return dict(self._runs)

    def _job(self, id: str, path: Path) -> WebJob | None:
        run_record = self.run_record(path)
        if not run_record:
            return None
        began = _seconds(run_record.get("started")) or _changed(path / RUN_FILE)
        state = _STATES.get(str(run_record.get("status")), "lost")
        last = max(_changed(path / METRICS), _changed(path / RUN_FILE))
        if run_record.get("status") == "running" and time.time() - last < SILENT_S:
            state = "running"
        ended = None if state == "running" else (_seconds(run_record.get("finished")) or last)
        return WebJob(
            id, "train", "", [], began, began, str(path), state=state, ended=ended, starts=1 + _was_resumed(run_record)
        )


def run_id(path: Path) -> str:
    return "run-" + hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


def kind_of(output_dir: str | Path) -> FolderKind:
    """Adapter or whole weights, by the names of its files."""
    folder = Path(output_dir)
    try:
        names = set(os.listdir(folder))
    except OSError:
        return FolderKind()
    weights = any(name.endswith((".safetensors", ".pdparams")) for name in names)
    for name in ADAPTER_CONFIGS:
        if name in names:
            return FolderKind(True, weights, _base(folder / name))
    return FolderKind(False, weights and "config.json" in names)


def _base(config: Path) -> str:
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
        base = content.get("base_model_name_or_path") if isinstance(content, dict) else ""
    except (OSError, ValueError, RecursionError):
        return ""
    return base if isinstance(base, str) else ""


def _search(root: Path) -> Iterator[Path]:
    """Folders with a run.json, newest first."""
    runs: list[tuple[float, Path]] = []
    for at, folders, files in islice(os.walk(root), MAX_FOLDERS):  # symlinks are not followed
        here = Path(at)
        if RUN_FILE in files:
            runs.append((_changed(here / RUN_FILE), here))
        if len(here.relative_to(root).parts) >= MAX_DEPTH:
            folders[:] = []
        keep = (f for f in folders if not f.startswith(".") and f not in SKIPPED and not _CHECKPOINT.fullmatch(f))
        folders[:] = sorted(keep)
    yield from (path for _, path in sorted(runs, reverse=True))


def _seconds(text: Any) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return 0.0


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _was_resumed(run_record: Mapping[str, Any]) -> int:
    return int(bool(run_record.get("start_step")))
