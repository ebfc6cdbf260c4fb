"""MLflow (`report_to: mlflow`): metrics, keys as parameters; the server of MLFLOW_TRACKING_URI, else logging_dir."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from erniekit.track.atomic import plain
from erniekit.track.base import Kind, MissingPackage, RunInfo, Tracker, tagged
from erniekit.track.run_id import shown_name, store_id, stored_id

BATCH = 100  # parameters of one call, and
LONGEST = 6000  # characters of one value: limits of MLflow's servers


class MLflowTracker(Tracker):
    name = "mlflow"

    def __init__(self) -> None:
        # MLflow reads these on import. A folder works without a database, and has to be allowed.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            import mlflow
        except ImportError as error:
            raise MissingPackage(self.name, error) from None
        self._mlflow: Any = mlflow
        self._client: Any = None
        self._id = ""

    def start(self, run: RunInfo) -> None:
        place = os.environ.get("MLFLOW_TRACKING_URI") or (run.logs / "mlruns").resolve().as_uri()
        self._client = self._mlflow.MlflowClient(tracking_uri=place)
        resumed = stored_id(run, self.name)
        if resumed:
            self._id = resumed
            self._client.update_run(resumed, status="RUNNING")
            return
        created = self._client.create_run(self._experiment(), run_name=shown_name(run))
        self._id = created.info.run_id
        store_id(run, self.name, self._id)
        pairs = [(key, str(value)[:LONGEST]) for key, value in plain(run.config).items()]
        params = [self._mlflow.entities.Param(key, text) for key, text in pairs]
        for at in range(0, len(params), BATCH):
            self._client.log_batch(self._id, params=params[at : at + BATCH])

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "erniekit")  # mlflow's own variable, kept in mlflow's file
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found else self._client.create_experiment(name)

    def log(self, step: int, metrics: Mapping[str, float], kind: Kind) -> None:
        now, metric = int(time.time() * 1000), self._mlflow.entities.Metric
        numbers = [metric(key, value, now, step) for key, value in tagged(step, metrics).items()]
        self._client.log_batch(self._id, metrics=numbers)

    def close(self) -> None:
        if self._id:
            self._client.set_terminated(self._id)
