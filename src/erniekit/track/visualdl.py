"""VisualDL scalars in logging_dir (`report_to: visualdl`), under the tags that ERNIEKit's own tools read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from erniekit.track.base import Kind, MissingPackage, RunInfo, Tracker, tagged


class VisualDLTracker(Tracker):
    name = "visualdl"

    def __init__(self) -> None:
        try:
            from visualdl import LogWriter
        except ImportError as error:
            raise MissingPackage(self.name, error) from None
        self._open: Any = LogWriter
        self._writer: Any = None

    def start(self, run: RunInfo) -> None:
        self._writer = self._open(logdir=str(run.logs))

    def log(self, step: int, metrics: Mapping[str, float], kind: Kind) -> None:
        for name, value in tagged(step, metrics).items():
            self._writer.add_scalar(tag=name, value=value, step=step)

    def event(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(tag=f"events/{name}", text_string=text or name, step=step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
