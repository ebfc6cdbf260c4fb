"""Trackio (`report_to: trackio`): runs in its local store (TRACKIO_DIR), shown by `trackio show`."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from erniekit.track.atomic import plain
from erniekit.track.base import Kind, MissingPackage, RunInfo, Tracker, tagged
from erniekit.track.run_id import shown_name


class TrackioTracker(Tracker):
    name = "trackio"

    def __init__(self) -> None:
        try:
            import trackio
        except ImportError as error:
            raise MissingPackage(self.name, error) from None
        self._trackio: Any = trackio
        self._run: Any = None

    def start(self, run: RunInfo) -> None:
        with redirect_stdout(io.StringIO()):  # six lines on how to open its page; docs/train.md has the command
            self._run = self._trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", "erniekit"),
                name=shown_name(run),
                resume="allow" if run.start_step else "never",  # by name: trackio has no other handle
                config=plain(run.config),
                embed=False,
            )

    def log(self, step: int, metrics: Mapping[str, float], kind: Kind) -> None:
        self._run.log(tagged(step, metrics), step=step)

    def close(self) -> None:
        if self._run is not None:
            with redirect_stdout(io.StringIO()):
                self._trackio.finish()  # not the run's own: that one is finished again at exit
