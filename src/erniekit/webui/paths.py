"""Roots: the folders a page may name files in. Every path of a form passes here before a job may read or write it.

Called by forms.check and jobs.start; the answer is the real path, symlinks followed, and that is what the job is given.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from erniekit.errors import ConfigError

MAX_LENGTH = 1024  # of a whole path: longer ones are no path anybody typed
MAX_NAME = 255  # of one part of it, as file systems have it

# Keys whose value is one path, paths in a list, `name=path` in a list, or `weight path weight path`.
ONE = (
    "model_name_or_path", "tokenizer_name", "output_dir", "cache_dir", "logging_dir", "log_dir",
    "resume_from_checkpoint", "offline_dataset_path", "vision_model_name_or_path",
)  # fmt: skip
SEVERAL = ("lora_path", "train_dataset_path", "eval_dataset_path", "text_dataset_path")
NAMED = ("lora_modules",)
WEIGHED = ("input_dir", "data_filelist")
KEYS = (*ONE, *SEVERAL, *NAMED, *WEIGHED)

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class PathError(ConfigError):
    """A path that is none, or that leads out of the roots."""


class Roots:
    """The working directory unless others are named; the first is where relative paths start."""

    def __init__(self, folders: Sequence[str | Path] = ()) -> None:
        self.folders = tuple(Path(os.path.realpath(Path(f).expanduser())) for f in folders or (Path.cwd(),))
        if missing := [str(f) for f in self.folders if not f.is_dir()]:
            raise ConfigError(f"{missing[0]} is no folder", where="root", fix="name folders that exist")

    def with_folder(self, folder: str | Path) -> Roots:
        return Roots((*self.folders, folder))

    def resolve(self, text: str, key: str = "path") -> Path:
        """The real path of what was typed; a PathError where it is not inside a root."""
        _check_text(text, key)
        typed = Path(text).expanduser()
        try:
            real = Path(os.path.realpath(self.folders[0] / typed))
        except (OSError, ValueError) as error:
            raise PathError(f"{key} is no path: {error}", where=key, fix="check the path") from None
        if not self.holds(real):
            raise PathError(
                f"{key} leads outside the folders of this page: {_short(text)}",
                where=key,
                fix="use a path inside " + " or ".join(map(str, self.folders)) + ", or start the page with root=DIR",
            )
        return real

    def holds(self, real: Path) -> bool:
        return any(real == folder or folder in real.parents for folder in self.folders)

    def settle(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values with every path in them resolved; the first one that leads out raises."""
        return {name: self.settle_one(name, value) for name, value in values.items()}

    def settle_one(self, name: str, value: Any) -> Any:
        if name not in KEYS or value in (None, "", (), []):
            return value
        if name == "resume_from_checkpoint" and str(value).lower() in ("true", "false", "none"):
            return value
        if name in ONE:
            return self._model_or_path(name, str(value))
        if name in WEIGHED:
            return self._weighed(name, str(value))
        words = value.split(",") if isinstance(value, str) else list(value)
        words = [str(word).strip() for word in words if str(word).strip()]
        if name in NAMED:
            return [f"{label}={self.resolve(path, name)}" for label, path in (_halves(word, name) for word in words)]
        return [str(self.resolve(word, name)) for word in words]

    def _model_or_path(self, name: str, text: str) -> str:
        """A hub id (`owner/name`, nothing of that name on the disk) stays as it is: it is looked up in the cache."""
        real = self.resolve(text, name)
        hub = name == "model_name_or_path" and text.count("/") == 1 and not text.startswith(("/", ".", "~", "-"))
        return text if hub and not real.exists() else str(real)

    def _weighed(self, name: str, text: str) -> str:
        gap = "," if "," in text else " "
        words = [word.strip() for word in text.split(gap) if word.strip()]
        return gap.join(word if _is_number(word) else str(self.resolve(word, name)) for word in words)


def _check_text(text: str, key: str) -> None:
    if not text or not text.strip():
        raise PathError(f"{key} is empty", where=key, fix="name a file or folder")
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise PathError(f"{key} holds a control character", where=key, fix="type the path again")
    too_long = len(os.fsencode(text)) > MAX_LENGTH or any(len(os.fsencode(p)) > MAX_NAME for p in text.split("/"))
    if too_long:
        raise PathError(f"{key} is longer than a path can be", where=key, fix=f"at most {MAX_LENGTH} bytes")


def _halves(word: str, key: str) -> tuple[str, str]:
    label, equals, path = word.partition("=")
    if not equals or not path or not _LABEL.fullmatch(label):
        raise PathError(f"{key} is {_short(word)!r}", where=key, fix="name=DIR, such as mine=output/run")
    return label, path


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
