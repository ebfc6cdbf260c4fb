"""Run names: what people call their runs, kept in one small file of the page; no folder is moved or renamed.

Used by runs.py. The key of a name is the run's output folder, so that it stays when the job that made it is deleted.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

from erniekit.errors import ConfigError
from erniekit.webui.private_files import replace_text

FILE = "names.json"
MAX_NAME = 80  # characters
MAX_NAMES = 10_000


class RunNames:
    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._lock = threading.Lock()

    def get(self, key: str) -> str:
        """The name given to a run; empty where none was."""
        return self._read().get(key, "")

    def all(self) -> dict[str, str]:
        return self._read()

    def rename(self, key: str, name: str) -> str:
        """Keep `name` for a run; an empty one restores the default."""
        name = " ".join("".join(c for c in name if c.isprintable() or c.isspace()).split())
        if len(name) > MAX_NAME:
            raise ConfigError(f"the name is {len(name)} characters long", where="name", fix=f"at most {MAX_NAME}")
        with self._lock:
            names = self._read()
            if name and key not in names and len(names) >= MAX_NAMES:
                raise ConfigError(f"{MAX_NAMES:,} runs have names", where=str(self.path), fix="clear some of them")
            names.pop(key, None)
            if name:
                names[key] = name
            self._write(names)
        return name

    def _read(self) -> dict[str, str]:
        try:
            names = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {str(k): str(v) for k, v in names.items()} if isinstance(names, dict) else {}

    def _write(self, names: dict[str, str]) -> None:
        replace_text(self.path, json.dumps(names, indent=1, ensure_ascii=False) + "\n")
