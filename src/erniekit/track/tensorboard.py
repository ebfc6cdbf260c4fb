"""TensorBoard scalars in logging_dir (`report_to: tensorboard`); the only file here that imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from erniekit.track.base import Kind, MissingPackage, RunInfo, Tracker, tagged


class TensorBoardTracker(Tracker):
    name = "tensorboard"

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingPackage(self.name, error) from None
        self._open: Any = SummaryWriter
        self._writer: Any = None

    def start(self, run: RunInfo) -> None:
        # purge_step hides what a killed run wrote after the checkpoint that is resumed.
        purge = run.start_step + 1 if run.start_step else None
        self._writer = self._open(log_dir=str(run.logs), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float], kind: Kind) -> None:
        for name, value in tagged(step, metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def event(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(f"events/{name}", text or name, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
