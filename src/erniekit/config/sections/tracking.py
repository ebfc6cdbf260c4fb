"""What is logged, how often and where. Read by the recipes, which make the trackers."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key
from erniekit.registry import Registry

_REPORT_TO = ("visualdl", "tensorboard", "wandb", "swanlab", "mlflow", "trackio", "all", "none")


@dataclass(frozen=True)
class TrackingSection:
    logging_steps: int = key(1, "Steps between log lines (ERNIEKit: 500).", low=1, basic=True)
    logging_strategy: str = key("steps", "When to log.", choices=("no", "steps", "epoch"))
    logging_first_step: bool = key(False, "Also log step 1, regardless of logging_steps.")
    logging_dir: str | None = key(None, "Folder for event files; default: output_dir/runs.", path="out")
    report_to: tuple[str, ...] = key(
        ("tensorboard",),
        "Experiment trackers, all or none; metrics.jsonl is always written.",
        choices=_REPORT_TO,
        further=Registry("tracker (report_to)", dict.fromkeys(_REPORT_TO, ""), group="erniekit.trackers"),
        basic=True,
    )
    run_name: str | None = key(None, "Name of the run in the trackers.")
    disable_tqdm: bool | None = key(None, "Log lines instead of the progress bar.")
    wandb_api_key: str | None = key(
        None, "W&B key; prefer the variable WANDB_API_KEY: command lines are visible to others.", secret=True
    )
    wandb_http_proxy: str | None = key(None, "Proxy for W&B, for HTTP and HTTPS.", secret=True)
