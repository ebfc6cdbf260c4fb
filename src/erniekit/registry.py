"""Registry: name -> "module:attr", imported on first use, so a table can be read without importing what it lists.

With a group, entry points of that group in installed packages count as well. They are looked for only where a name is
not in the table: that reads the metadata of every installed package.
"""

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
    def __init__(self, kind: str, entries: dict[str, str], group: str = "") -> None:
        self.kind, self._entries, self._group = kind, dict(entries), group

    def __contains__(self, name: str) -> bool:
        return name in self._entries or name in self._installed()

    def _installed(self) -> dict[str, str]:
        """Adds what installed packages bring, once."""
        group, self._group = self._group, ""
        if group:
            from importlib.metadata import entry_points

            self._entries = {**{found.name: found.value for found in entry_points(group=group)}, **self._entries}
        return self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, name: str) -> Any:
        if name not in self:
            near = nearest(name, list(self._entries))
            hint = f"did you mean {near[0]!r}?" if near else "choose one of: " + ", ".join(self._entries)
            raise ConfigError(f"unknown {self.kind} {name!r}", fix=hint)
        module, _, attr = self._entries[name].partition(":")
        return getattr(import_module(module), attr)
