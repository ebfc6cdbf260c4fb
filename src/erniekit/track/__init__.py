"""What a user sees during and after a run: the trackers by name, and the one call that makes them.

The recipes call make_trackers early (a missing package stops the run before any work), start before step 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from erniekit.errors import ConfigError
from erniekit.log import is_main_rank, warn
from erniekit.printable import error_line
from erniekit.registry import Registry, foreign_code
from erniekit.track.base import MissingPackage, RunInfo, Tracker, Trackers

if TYPE_CHECKING:
    from erniekit.track.runfile import RunRecord


def _problem(name: str, made: Any) -> str:
    """What is wrong with a tracker that an installed package brings."""
    return "" if isinstance(made, type) and issubclass(made, Tracker) else "is not a subclass of erniekit.Tracker"


TRACKERS = Registry(
    "tracker (report_to)",
    {
        "console": "erniekit.track.console:ConsoleTracker",
        "jsonl": "erniekit.track.jsonl:JsonlTracker",
        "mlflow": "erniekit.track.mlflow:MLflowTracker",
        "swanlab": "erniekit.track.swanlab:SwanLabTracker",
        "tensorboard": "erniekit.track.tensorboard:TensorBoardTracker",
        "trackio": "erniekit.track.trackio:TrackioTracker",
        "visualdl": "erniekit.track.visualdl:VisualDLTracker",
        "wandb": "erniekit.track.wandb:WandbTracker",
    },
    group="erniekit.trackers",
    check=_problem,
)
ALWAYS = ("jsonl", "console")  # every run has these, whatever report_to is

__all__ = ["TRACKERS", "RunInfo", "Tracker", "Trackers", "make_trackers"]


def make_trackers(
    report_to: Sequence[str],
    output_dir: str | Path,
    logging_dir: str | Path | None = None,
    *,
    run_name: str = "",
    config: Mapping[str, Any] | None = None,
    disable_tqdm: bool | None = None,
    wandb_api_key: str | None = None,
    wandb_http_proxy: str | None = None,
    explicit: bool = True,
    record: RunRecord | None = None,
    more: Sequence[Tracker] = (),
) -> Trackers:
    """The trackers of one run, not yet started; none on ranks other than 0.

    `explicit` is False when report_to is the default and not set by the user: then a tracker whose package is
    absent is left out instead of stopping the run. `all` means those that are installed. more: of a Python session.
    """
    info = RunInfo(
        output_dir=Path(output_dir),
        logging_dir=Path(logging_dir) if logging_dir else None,
        name=run_name,
        config=config or {},
        disable_tqdm=disable_tqdm,
        wandb_api_key=wandb_api_key,
        wandb_http_proxy=wandb_http_proxy,
    )
    if not is_main_rank():
        return Trackers([], info)
    trackers: list[Tracker] = [TRACKERS.get(name)() for name in ALWAYS]
    for name in _selected(report_to):
        try:
            trackers.append(_made(name))
        except MissingPackage:
            if explicit and "all" not in report_to:
                raise
        except ConfigError as error:  # an installed package's, broken
            if "all" not in report_to:
                raise
            warn(error.what)
    if record is not None:
        trackers.insert(1, record)
    return Trackers([*trackers, *more], info)


def _made(name: str) -> Tracker:
    kind, package = TRACKERS.get(name), TRACKERS.distribution(name)
    try:
        made: Tracker = kind()
    except Exception as error:
        if not package or isinstance(error, ConfigError):
            raise
        code = foreign_code(error)
        raise ConfigError(
            f"tracker {name} of the installed package {package} cannot be made: {error_line(error)}",
            where="report_to" + (f", {code.place}" if code else ""),
            fix=f"update {package.partition(' ')[0]}, or leave {name} out of report_to",
        ) from error
    if package and made.name == Tracker.name:
        made.name = name  # warnings name it
    return made


def _selected(report_to: Sequence[str]) -> list[str]:
    names = [report_to] if isinstance(report_to, str) else list(report_to)
    if "all" in names:
        names += TRACKERS.names()
    selected = [name for name in names if name not in ("all", "none", *ALWAYS)]
    return list(dict.fromkeys(selected))
