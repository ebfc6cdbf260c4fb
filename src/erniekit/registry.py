"""Registry: name -> "module:attr", imported on first use, so a table can be read without importing what it lists."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from erniekit.errors import ConfigError


def nearest(name: str, known: Iterator[str] | list[str], count: int = 1) -> list[str]:
    """The known names closest to a mistyped one, best first; empty when none is near."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=0.6)


class Registry:
    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind, self._entries = kind, dict(entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, name: str) -> Any:
        if name not in self._entries:
            near = nearest(name, list(self._entries))
            hint = f"did you mean {near[0]!r}?" if near else "choose one of: " + ", ".join(self._entries)
            raise ConfigError(f"unknown {self.kind} {name!r}", fix=hint)
        module, _, attr = self._entries[name].partition(":")
        return getattr(import_module(module), attr)
