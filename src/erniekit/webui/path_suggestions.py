"""Path suggestions: models and datasets within the roots, by the names of files. Used by pages/page_context.py.

A walk of bounded depth and count: a root may be a home directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from erniekit.webui.paths import Roots

MAX_DEPTH = 4  # folders below a root
MAX_FOLDERS = 2000
MAX_SUGGESTIONS = 200  # of either kind
NO_DATA = ("metrics.jsonl",)  # a run's own files
SKIPPED = {"node_modules", "__pycache__", "site-packages", "jobs"}


def suggest_paths(roots: Roots) -> dict[str, list[str]]:
    """Suggestions by key: folders that hold a model, a run or adapters, and dataset files."""
    models: list[str] = []
    data: list[str] = []
    seen = 0
    for root in roots.folders:
        for folder, names in _folders(root):
            seen += 1
            if seen > MAX_FOLDERS:
                break
            shown = _shown(folder, root, roots)
            if _is_model(names):
                models.append(shown)
            elif "run.json" not in names:
                data += [f"{shown}/{name}".removeprefix("./") for name in sorted(names) if _is_data(name)]
    runs = [name for name in models if not Path(name).name.startswith("checkpoint-")]
    return {
        "model_name_or_path": models[:MAX_SUGGESTIONS],
        "output_dir": runs[:MAX_SUGGESTIONS],
        "lora_path": models[:MAX_SUGGESTIONS],
        "train_dataset_path": data[:MAX_SUGGESTIONS],
        "eval_dataset_path": data[:MAX_SUGGESTIONS],
    }


def _folders(root: Path) -> Iterator[tuple[Path, set[str]]]:
    for at, folders, files in os.walk(root):  # symlinks are not followed
        here = Path(at)
        depth = len(here.relative_to(root).parts)
        folders[:] = (
            sorted(f for f in folders if not f.startswith(".") and f not in SKIPPED) if depth < MAX_DEPTH else []
        )
        yield here, set(files)


def _is_model(names: set[str]) -> bool:
    weights = any(name.endswith((".safetensors", ".pdparams")) for name in names)
    return weights and bool(names & {"config.json", "adapter_config.json", "lora_config.json"})


def _is_data(name: str) -> bool:
    plain = name.endswith((".jsonl", ".parquet", ".jsonl.gz")) or (name.endswith(".json") and "-" in name)
    return plain and name not in NO_DATA


def _shown(folder: Path, root: Path, roots: Roots) -> str:
    """Relative to the first root, where relative paths start; in full in the others."""
    return str(folder.relative_to(root)) if root == roots.folders[0] else str(folder)
