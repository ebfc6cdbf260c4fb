"""Weights & Biases (`report_to: wandb`): the same tags, the config, and a run that a resume goes on with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from erniekit.track.atomic import plain
from erniekit.track.base import Kind, MissingPackage, RunInfo, Tracker, tagged
from erniekit.track.run_id import shown_name, store_id, stored_id


class WandbTracker(Tracker):
    name = "wandb"

    def __init__(self) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingPackage(self.name, error) from None
        self._wandb: Any = wandb
        self._run: Any = None

    def start(self, run: RunInfo) -> None:
        resumed = stored_id(run, self.name)
        _set_variables(run)
        run.output_dir.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "erniekit"),  # wandb's own variable, kept in wandb's file
            name=shown_name(run),
            id=resumed,
            resume="allow" if resumed else None,
            dir=str(run.output_dir),
            config=plain(run.config),
        )
        store_id(run, self.name, self._run.id)
        # Our own step axis: wandb's counter never goes back, and a resume from an earlier checkpoint does.
        self._run.define_metric("train/global_step")
        self._run.define_metric("*", step_metric="train/global_step", step_sync=True)

    def log(self, step: int, metrics: Mapping[str, float], kind: Kind) -> None:
        self._run.log(tagged(step, metrics))

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _set_variables(run: RunInfo) -> None:
    """The run's keys as wandb's own variables: init logs in before it looks at settings it was called with."""
    proxy = run.wandb_http_proxy
    given = {"WANDB_API_KEY": run.wandb_api_key, "WANDB_HTTP_PROXY": proxy, "WANDB_HTTPS_PROXY": proxy}
    os.environ.update({name: value for name, value in given.items() if value})
