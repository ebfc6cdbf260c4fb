"""What a path of a form leads to once it is opened: links in a folder, lines of a list, token files, an adapter's base.

Called by paths.py, which decides whether they may be followed. Reads only, within bounds: a folder may be hostile.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from erniekit.errors import ConfigError

MAX_ENTRIES = 20_000
MAX_LIST = 1_000_000  # bytes
MAX_LINES = 10_000
MAX_CONFIG = 1_000_000  # bytes of an adapter's config
ADAPTER_CONFIGS = ("adapter_config.json", "lora_config.json")
SUFFIXES = (".bin", ".idx", "_ids.npy", "_idx.npz")  # of token files


def links_in(folder: Path, inside: Callable[[Path], bool]) -> tuple[list[Path], bool]:
    """The symlinks in a folder and all below it; False where it holds more than MAX_ENTRIES.

    Links to folders that are `inside` are followed: a job would follow them. Level by level, so
    that of too large a folder the upper ones, which jobs write to, are seen.
    """
    links: list[Path] = []
    remaining = MAX_ENTRIES
    pending, visited = deque([folder]), {os.path.realpath(folder)}
    while pending:
        here = pending.popleft()
        try:
            with os.scandir(here) as entries:
                for entry in entries:
                    remaining -= 1
                    if remaining < 0:
                        return links, False
                    if entry.is_symlink():
                        links.append(Path(entry.path))
                    elif not entry.is_dir(follow_symlinks=False):
                        continue
                    real = os.path.realpath(entry.path)
                    if real not in visited and (not entry.is_symlink() or (inside(Path(real)) and os.path.isdir(real))):
                        visited.add(real)
                        pending.append(Path(real))
        except OSError:  # a file, nothing yet, or nothing that the job could read either
            continue
    return links, True


def file_lines(path: Path, key: str) -> list[str]:
    """Lines of a list that are not empty, stripped; a ConfigError where it is not a list of names."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_LIST + 1)
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"{key} cannot be read as text", where=key, fix="a file with one prefix a line") from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(raw) > MAX_LIST or len(lines) > MAX_LINES:
        raise ConfigError(f"{key} is too long a list", where=key, fix=f"at most {MAX_LINES:,} lines")
    return lines


def token_files(prefix: Path) -> list[Path]:
    """The files that a prefix of token files, or one of the files itself, would open; those that are there."""
    name = str(prefix)
    bare = {name, *(name.removesuffix(suffix) for suffix in SUFFIXES)}
    return [Path(one + suffix) for one in sorted(bare) for suffix in SUFFIXES if os.path.lexists(one + suffix)]


def adapter_bases(folder: Path) -> list[tuple[Path, str]]:
    """(config, the base it names) of the adapters in a folder and its checkpoints."""
    bases = []
    try:
        inside = [folder, *(p for p in sorted(folder.iterdir())[:MAX_ENTRIES] if p.is_dir())]
    except OSError:
        return []
    for config in (place / name for place in inside for name in ADAPTER_CONFIGS):
        try:
            with config.open("rb") as file:
                config_json = json.loads(file.read(MAX_CONFIG))
            base = config_json.get("base_model_name_or_path")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue  # not there; or one that the job will not read either
        if isinstance(base, str) and base:
            bases.append((config, base))
    return bases
