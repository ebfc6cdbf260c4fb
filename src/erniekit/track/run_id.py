"""The id a tracking service gave a run, kept in output_dir so that a resumed run goes on under it. Used by the trackers
of services; files/output.py lists the names."""

from __future__ import annotations

from erniekit.files import own
from erniekit.track.atomic import write_text
from erniekit.track.base import RunInfo


def stored_id(run: RunInfo, tracker: str) -> str | None:
    """The id to go on with; None for a fresh run."""
    path = run.output_dir / f"{tracker}_run_id"
    return path.read_text(encoding="utf-8").strip() or None if run.start_step and path.is_file() else None


def store_id(run: RunInfo, tracker: str, run_id: str) -> None:
    run.output_dir.mkdir(parents=True, exist_ok=True)
    write_text(own(run.output_dir / f"{tracker}_run_id"), f"{run_id}\n")


def shown_name(run: RunInfo) -> str:
    return run.name or run.output_dir.resolve().name
