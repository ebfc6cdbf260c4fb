"""Path suggestions: models and datasets within the roots, by the names of files. Used by pages/page_context.py.

A walk of bounded depth and count: a root may be a home directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from erniekit.webui.contents import ADAPTER_CONFIGS
from erniekit.webui.paths import Roots
from erniekit.webui.uploads import DATA as UPLOADED
from erniekit.webui.uploads import HOME, SUFFIXES

MAX_DEPTH = 4  # folders below a root
MAX_FOLDERS = 2000
MAX_SUGGESTIONS = 200  # of either kind
NO_DATA = ("metrics.jsonl",)  # a run's own files
SKIPPED = {"node_modules", "__pycache__", "site-packages", "jobs"}


def suggest_paths(roots: Roots) -> dict[str, list[str]]:
    """Suggestions by key: models, adapters and dataset files. An adapter is no base: it is offered as an adapter."""
    models: dict[str, None] = {}
    adapters: dict[str, None] = {}
    data: dict[str, None] = {}
    visited = 0
    for root in roots.folders:
        for folder, names in _folders(root):
            visited += 1
            if visited > MAX_FOLDERS:
                break
            shown = _shown(folder, roots)
            if _has_weights(names) and names & set(ADAPTER_CONFIGS):
                adapters[shown] = None
            elif _has_weights(names) and "config.json" in names:
                models[shown] = None
            elif "run.json" not in names:
                ours = folder.parent.name == HOME and folder.name == UPLOADED
                files = (f"{shown}/{name}" for name in sorted(names) if _is_data(name, ours))
                data.update(dict.fromkeys(file.removeprefix("./") for file in files))
    runs = [name for name in (*adapters, *models) if not Path(name).name.startswith("checkpoint-")]
    return {
        "model_name_or_path": [*models][:MAX_SUGGESTIONS],
        "teacher_model_name_or_path": [*models, *adapters][:MAX_SUGGESTIONS],
        "output_dir": runs[:MAX_SUGGESTIONS],
        "lora_path": [*adapters][:MAX_SUGGESTIONS],
        "train_dataset_path": [*data][:MAX_SUGGESTIONS],
        "eval_dataset_path": [*data][:MAX_SUGGESTIONS],
    }


def _folders(root: Path) -> Iterator[tuple[Path, set[str]]]:
    for at, folders, files in os.walk(root):  # symlinks are not followed
        here = Path(at)
        depth = len(here.relative_to(root).parts)
        folders[:] = (
            sorted(f for f in folders if not f.startswith(".") and f not in SKIPPED) if depth < MAX_DEPTH else []
        )
        yield here, set(files)


def _has_weights(names: set[str]) -> bool:
    return any(name.endswith((".safetensors", ".pdparams")) for name in names)


def _is_data(name: str, uploaded: bool) -> bool:
    """By its name; .json, .csv and .txt are often something else, so these count where people have put data."""
    if uploaded:
        return name.lower().endswith(SUFFIXES[UPLOADED])
    plain = name.endswith((".jsonl", ".parquet", ".jsonl.gz")) or (name.endswith(".json") and "-" in name)
    return plain and name not in NO_DATA


def _shown(folder: Path, roots: Roots) -> str:
    """Relative to the first root, where relative paths start; in full elsewhere."""
    first = roots.folders[0]
    return str(folder.relative_to(first)) if folder.is_relative_to(first) else str(folder)
