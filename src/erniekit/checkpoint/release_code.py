"""Which Python files of its release a vision-language folder lacks: vLLM runs them, erniekit never does.

Called by export/run.py and serve/engines/vllm.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from erniekit.data.settings_files import read_settings

CONFIG = "config.json"
# Settings that may name code (auto_map), and which entries vLLM follows there.
NAMED_IN = {
    CONFIG: ("AutoConfig", "AutoProcessor"),
    "preprocessor_config.json": ("AutoProcessor", "AutoImageProcessor"),
    "processor_config.json": ("AutoProcessor", "AutoImageProcessor"),
    "tokenizer_config.json": ("AutoProcessor", "AutoTokenizer"),
}


def missing_code(folder: Path) -> list[str]:
    """Files that are named and not here; `auto_map: ...` for an entry that no file has."""
    named = [entry for file in NAMED_IN for entry in _named(folder, file)]
    lacking = [
        f"auto_map: {kind}" for kind in ("AutoConfig", "AutoProcessor") if all(kind != found for found, _ in named)
    ]
    # `repository--module.Class` is fetched from there.
    files = {f"{path.rpartition('.')[0]}.py" for _, path in named if "--" not in path}
    return lacking + sorted(name for name in files if not (folder / name).is_file())


def _named(folder: Path, file: str) -> Iterator[tuple[str, str]]:
    """(entry, module.Class)"""
    path = folder / file
    found: Any = read_settings(path).get("auto_map") if path.is_file() else None
    for kind in NAMED_IN[file] if isinstance(found, dict) else ():
        value = found.get(kind)
        for each in value if isinstance(value, list) else [value]:  # a tokenizer's: slow and fast
            if isinstance(each, str):
                yield kind, each
