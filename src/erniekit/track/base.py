"""What a tracker is, and the fan-out that keeps a failing one from ending a run. The loop uses Trackers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from erniekit.errors import ConfigError, Preempted
from erniekit.extras import install_command
from erniekit.log import warn

Kind = Literal["train", "eval", "end"]


class MissingPackage(ConfigError):
    """A tracker was configured and its package is not installed."""

    def __init__(self, name: str, why: object) -> None:
        super().__init__(
            f"report_to: {name} needs a package that does not import ({why})",
            where="report_to",
            fix=f"{install_command(name)}, or leave {name} out of report_to",
        )


@dataclass(frozen=True)
class RunInfo:
    """What trackers get of the run. `start_step` is the step resumed from, 0 for a fresh run."""

    output_dir: Path
    logging_dir: Path | None = None  # None: a folder under output_dir/runs is chosen at start
    total_steps: int = 0
    start_step: int = 0
    name: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)  # flat keys, for trackers that show them
    disable_tqdm: bool | None = None
    wandb_api_key: str | None = field(default=None, repr=False)
    wandb_http_proxy: str | None = field(default=None, repr=False)  # may hold a password

    @property
    def logs(self) -> Path:
        """The folder of event files."""
        assert self.logging_dir is not None, "Trackers.start chooses it"
        return self.logging_dir


class Tracker:
    """What is given all that a run logs. Every method does nothing by default: a tracker overrides what it has a place
    for. One that raises is switched off with a warning, and the run goes on."""

    name = "tracker"

    def start(self, run: RunInfo) -> None:
        """Before the first step; files are opened here, not in __init__."""

    def log(self, step: int, metrics: Mapping[str, float], kind: Kind) -> None:
        """Numbers of one logged step, of one evaluation, or of the whole run."""

    def event(self, step: int, name: str, text: str) -> None:
        """Something that happened: start, resume, save, eval, best, skip, stop, signal."""

    def advance(self, step: int) -> None:
        """An optimiser step is done; called for every step, also those that are not logged."""

    def status(self, text: str) -> None:
        """What the run does while no step advances ("evaluating 3/10"); empty when back to training."""

    def close(self) -> None:
        """After the last call."""


class Trackers:
    """Hands every call to every tracker. One that raises is named once and switched off; the others go on."""

    def __init__(self, trackers: Sequence[Tracker], info: RunInfo) -> None:
        self._live, self.info = list(trackers), info

    @property
    def names(self) -> list[str]:
        return [tracker.name for tracker in self._live]

    def start(self, total_steps: int, start_step: int = 0) -> None:
        folder = self.info.logging_dir or default_logging_dir(self.info.output_dir, resuming=start_step > 0)
        self.info = replace(self.info, total_steps=total_steps, start_step=start_step, logging_dir=folder)
        self._each(lambda tracker: tracker.start(self.info))

    def log(self, step: int, metrics: Mapping[str, float | None], kind: Kind = "train") -> None:
        present = {name: value for name, value in metrics.items() if value is not None and name != "global_step"}
        numbers = {name: float(value) for name, value in present.items()}
        self._each(lambda tracker: tracker.log(step, numbers, kind))

    def event(self, step: int, name: str, text: str = "") -> None:
        self._each(lambda tracker: tracker.event(step, name, text))

    def advance(self, step: int) -> None:
        self._each(lambda tracker: tracker.advance(step))

    def status(self, text: str) -> None:
        self._each(lambda tracker: tracker.status(text))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())
        self._live = []

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._live):
            try:
                call(tracker)
            except Preempted:
                raise
            except Exception as error:
                self._live.remove(tracker)
                with suppress(Exception):
                    tracker.close()
                warn(f"{tracker.name} tracker is off for the rest of this run: {type(error).__name__}: {error}")


def tag(metric: str) -> str:
    """ERNIEKit's name of a metric in TensorBoard and VisualDL: loss -> train/loss, eval_loss -> eval/loss."""
    for prefix in ("eval", "test"):
        if metric.startswith(prefix + "_"):
            return f"{prefix}/{metric.removeprefix(prefix + '_')}"
    return f"train/{metric}"


def tagged(step: int, metrics: Mapping[str, float]) -> dict[str, float]:
    return {tag(name): value for name, value in {**metrics, "global_step": float(step)}.items()}


def default_logging_dir(output_dir: Path, resuming: bool) -> Path:
    """<output_dir>/runs/<time_host>; a resumed run goes on in the newest one: one curve, not two."""
    runs = output_dir / "runs"
    if resuming and runs.is_dir():
        folders = sorted((path for path in runs.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
        if folders:
            return folders[-1]
    return runs / f"{datetime.now():%b%d_%H-%M-%S}_{socket.gethostname()}"
