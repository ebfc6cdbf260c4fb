"""`base: other.yaml`: a recipe with only its differences from another. Called by sources for every recipe it reads.

The path is relative to the file that names it, so a tree of recipes can be moved as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from erniekit.config.files import FileEntry, read_file
from erniekit.errors import ConfigError

BASE = "base"
LONGEST = 16  # files in a chain of bases; a longer one is taken for a mistake

Recipe = tuple[str, Mapping[str, FileEntry]]  # the file's name, and its keys without `base`


def with_bases(name: str, *, standalone: bool = False) -> list[Recipe]:
    """The recipe and all it extends, the farthest first: what comes later wins. standalone: it may extend none."""
    found: list[Recipe] = []
    seen: dict[str, str] = {}  # real path -> the line that named it
    at = name  # of the line that names the next file
    while True:
        real = os.path.realpath(name)
        if real in seen:
            names = [n for n, _ in reversed(found)]
            raise ConfigError(
                f"recipes extend each other in a circle: {name} again" if names[1:] else f"{name} extends itself",
                where=at,
                fix=f"take `base` out of {'one of ' if names[1:] else ''}{', '.join(names)}",
            )
        if len(found) == LONGEST:
            raise ConfigError(f"more than {LONGEST} recipes extend each other", where=at, fix="name an earlier base")
        seen[real] = at
        entries = _read(name, at) if found else read_file(name)
        base = entries.pop(BASE, None)
        found.append((name, entries))
        if base is None:
            return found[::-1]
        at = f"{name}:{base.line}"
        if standalone:
            raise ConfigError(
                "this recipe cannot extend another",
                where=at,
                fix="erniekit recipes NAME --flat prints a shipped one whole",
            )
        name = _path_of(base, name, at)


def _path_of(base: FileEntry, name: str, at: str) -> str:
    text = base.given
    if not isinstance(text, str) or not text.endswith((".yaml", ".yml", ".json")):
        given = "empty" if text is None or text == "" else repr(text)
        raise ConfigError(
            f"base is {given}; expected one recipe", where=at, fix="base: other.yaml, or leave the line out"
        )
    if os.path.isabs(text):
        fix = f"base: {os.path.relpath(text, os.path.dirname(os.path.abspath(name)))}"
        raise ConfigError(f"base is {text}; expected a path relative to this file", where=at, fix=fix)
    return os.path.normpath(os.path.join(os.path.dirname(name), text))


def _read(name: str, at: str) -> dict[str, FileEntry]:
    """As read_file, but a file that cannot be opened is the fault of the line that names it."""
    if not os.path.isfile(name):
        try:
            return read_file(name)
        except ConfigError as error:
            raise ConfigError(error.what, where=at, fix=error.fix) from None
    return read_file(name)
