"""Which weights an output_dir offers: the folder itself, else its newest whole checkpoint. Used by export and split."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from erniekit.checkpoint import manifest
from erniekit.checkpoint.final_model import model_files
from erniekit.checkpoint.manager import step_of
from erniekit.checkpoint.manifest import Damaged, has_manifest, unreadable
from erniekit.checkpoint.published import check_checkpoint
from erniekit.errors import CheckpointError
from erniekit.files.listed import Listed
from erniekit.log import warn, warn_once
from erniekit.lora.adapter_files import is_adapter


@dataclass(frozen=True)
class ExportSource:
    path: Path
    is_adapter: bool


def find_source(output_dir: Path) -> ExportSource | None:
    """None when nothing was trained there. A damaged checkpoint is passed over with a warning, one whose settings were
    edited is not; one that cannot be read now stops: an older one must not take its place unnoticed."""
    own = _weights_in(output_dir)
    steps = [(step, path) for path in output_dir.glob("checkpoint-*") if (step := step_of(path)) is not None]
    if own is not None and not (steps and is_unfinished(output_dir)):
        return own
    if own is not None:
        why = "is from an earlier run, and this run is unfinished"
        warn(f"the model in {output_dir} {why}: the newest checkpoint is taken")
    damaged = []
    for _, path in sorted(steps, reverse=True):
        try:
            if has_manifest(path):  # checkpoints of other toolkits have none
                check_checkpoint(path, "sample")
        except Damaged as error:
            damaged.append(path)
            warn_once(f"{path} is damaged and passed over: {error.what}")
            continue
        found = _weights_in(path)
        if found is not None:
            return found
    for path in damaged:  # there is no better one, and what is trained on from is not needed here
        if _model_is_whole(path) and (found := _weights_in(path)) is not None:
            warn_once(f"{path} is taken all the same: the files of its model are whole, its optimiser's are not needed")
            return found
    if damaged:
        raise CheckpointError(
            f"every checkpoint in this folder is damaged ({len(damaged)} found)",
            where=str(output_dir),
            fix="train again, or restore one of them from a copy",
        )
    return None


def _model_is_whole(checkpoint: Path) -> bool:
    try:
        check_checkpoint(checkpoint, "full", only=model_files(manifest.load(checkpoint)).__contains__)
    except Damaged:
        return False
    return True


def is_unfinished(output_dir: Path) -> bool:
    """Whether a run began there that has not come to its end: then the folder's own model is not that run's."""
    try:
        record = json.loads((output_dir / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and record.get("status") in ("running", "stopped", "failed")


def _weights_in(folder: Path) -> ExportSource | None:
    try:
        if is_adapter(folder):
            return ExportSource(folder, is_adapter=True)
        listed = Listed(folder)
        has_weights = listed.has("config.json") and bool(listed.glob("model*.safetensors"))
    except OSError as error:
        raise unreadable(folder, error) from error
    return ExportSource(folder, is_adapter=False) if has_weights else None
