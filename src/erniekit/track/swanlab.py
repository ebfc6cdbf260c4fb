"""SwanLab (`report_to: swanlab`): the same tags and the config; offline in logging_dir unless the user is logged in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from erniekit.track.atomic import plain
from erniekit.track.base import Kind, MissingPackage, RunInfo, Tracker, tagged
from erniekit.track.run_id import shown_name, store_id, stored_id


class SwanLabTracker(Tracker):
    name = "swanlab"

    def __init__(self) -> None:
        try:
            import swanlab
        except ImportError as error:
            raise MissingPackage(self.name, error) from None
        self._swanlab: Any = swanlab
        self._run: Any = None

    def start(self, run: RunInfo) -> None:
        resumed = stored_id(run, self.name)
        settings = self._swanlab.Settings(terminal={"proxy_type": "none"})  # our screen is not copied
        self._run = self._swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", "erniekit"),  # swanlab's own variables, kept in swanlab's file
            name=shown_name(run),
            id=resumed,
            resume="allow" if resumed else None,
            mode=None if _is_logged_in() else "offline",
            log_dir=str(run.logs / "swanlab"),
            config=plain(run.config),
            settings=settings,
        )
        store_id(run, self.name, self._run.id)

    def log(self, step: int, metrics: Mapping[str, float], kind: Kind) -> None:
        self._run.log(tagged(step, metrics), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _is_logged_in() -> bool:
    """Whether swanlab's own default works: it prompts for a key on the terminal otherwise."""
    if os.environ.get("SWANLAB_MODE") or os.environ.get("SWANLAB_API_KEY"):
        return True
    return (Path(os.environ.get("SWANLAB_ROOT") or Path.home() / ".swanlab") / ".netrc").is_file()
