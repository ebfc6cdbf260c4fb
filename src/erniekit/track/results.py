"""The end files of an ERNIEKit output_dir: *_results.json, trainer_state.json. For the recipes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from erniekit.files import own, settle
from erniekit.track import jsonl
from erniekit.track.atomic import plain, write_json


def write_results(
    output_dir: str | Path,
    *,
    train: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
) -> list[Path]:
    """train_results.json and eval_results.json for what is given; all_results.json holds both.

    A later evaluation by itself joins the numbers of the training before it; a new training replaces it.
    """
    folder = Path(output_dir)
    everything = _old(folder / "all_results.json") if train is None else {}
    written = []
    for name, metrics in (("train", train), ("eval", evaluation)):
        if metrics is not None:
            path = folder / f"{name}_results.json"
            write_json(own(path), dict(sorted(metrics.items())))
            settle(path)
            everything.update(plain(metrics))
            written.append(path)
    if written:
        write_json(own(folder / "all_results.json"), dict(sorted(everything.items())))
        settle(folder / "all_results.json")
        written.append(folder / "all_results.json")
    return written


def speeds(output_dir: str | Path) -> dict[str, float]:
    """Time and rates of the training whose results are there; empty where there are none."""
    old = _old(Path(output_dir) / "train_results.json")
    names = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
    return {name: float(old[name]) for name in names if isinstance(old.get(name), int | float)}


def write_trainer_state(
    folder: str | Path,
    *,
    global_step: int,
    max_steps: int,
    num_train_epochs: float = 1,
    epoch: float | None = None,
    best_metric: float | None = None,
    best_model_checkpoint: str | None = None,
    summary: Mapping[str, Any] | None = None,
    metrics_from: str | Path | None = None,
) -> Path:
    """trainer_state.json as the HF and Paddle trainers write it; log_history comes from metrics.jsonl.

    `metrics_from` is the folder of metrics.jsonl where it is not `folder` (a checkpoint inside output_dir);
    `summary` (the whole-run numbers) becomes the last entry of log_history.
    """
    source = Path(metrics_from or folder) / jsonl.FILE
    history = [_entry(record) for record in jsonl.read(source) if record["global_step"] <= global_step]
    if summary:
        history.append({**plain(summary), "step": global_step})
    state = {
        "best_metric": best_metric,
        "best_model_checkpoint": best_model_checkpoint,
        "epoch": epoch,
        "global_step": global_step,
        "is_hyper_param_search": False,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "log_history": history,
        "max_steps": max_steps,
        "num_train_epochs": num_train_epochs,
        "total_flos": 0,
        "trial_name": None,
        "trial_params": None,
    }
    path = Path(folder) / "trainer_state.json"
    write_json(own(path), state)
    return settle(path)


def _entry(record: Mapping[str, Any]) -> dict[str, Any]:
    """HF readers plot `step` against `loss` or `eval_loss`, and print `epoch`."""
    entry = dict(record)
    if "progress_or_epoch" in entry:
        entry["epoch"] = entry["progress_or_epoch"]
    return {**entry, "step": record["global_step"]}


def _old(path: Path) -> dict[str, Any]:
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return old if isinstance(old, dict) else {}
