"""Registry: name -> "module:attr", imported on first use, so a table can be read without importing what it lists.

With a group, entry points of that group in installed packages count as well. A name of the table itself is found
without looking for them: that reads the metadata of every installed package (some 40 ms).
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from traceback import walk_tb
from typing import Any

from erniekit.errors import ConfigError
from erniekit.log import warn


def nearest(name: str, known: Iterator[str] | list[str], count: int = 1) -> list[str]:
    """The known names closest to a mistyped one, best first; empty when none is near."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=0.6)


_foreign: dict[str, str] = {}  # outermost name of modules that are not ours and were loaded by name -> whose they are


@dataclass(frozen=True)
class ForeignCode:
    """A line of another package's code that an error passed through."""

    place: str  # file:line
    owner: str  # "of the installed package moon-kit 1.0"
    inmost: bool  # no code of ours ran below it: what went wrong is in there

    @property
    def line(self) -> str:
        fault = "a fault of that code" if self.inmost else "a fault of that code, or of erniekit's that it called"
        return f"{self.place}, {self.owner}: {fault}"


def note_foreign(module: str, owner: str) -> None:
    """That a module is of another package, for `foreign_code`; called before it is imported."""
    top = module.partition(".")[0]
    if top != "erniekit":
        _foreign.setdefault(top, owner)


def owner_of(module: str) -> str:
    """Whose code a module is, of one that a plug-in brought; empty of all others."""
    return _foreign.get(module.partition(".")[0], "")


def foreign_code(error: BaseException) -> ForeignCode | None:
    """The inmost line of a plug-in's code in an error's traceback; None where none is in it. Libraries below are not
    looked at: what they were given decides."""
    found = None
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:  # from what was told to what it came of
        seen.append(cause)
        for frame, line in walk_tb(cause.__traceback__):
            module = str(frame.f_globals.get("__name__", ""))
            if owner := owner_of(module):
                found = ForeignCode(f"{frame.f_code.co_filename}:{line}", owner, True)
            elif found is not None and module.partition(".")[0] == "erniekit":
                found = replace(found, inmost=False)
        cause = cause.__cause__
    return found


@dataclass(frozen=True)
class Plugin:
    """An entry point of an installed distribution."""

    group: str  # erniekit.models, erniekit.losses, ...
    name: str
    value: str  # module:attr, or a module
    distribution: str  # its name and version

    def load(self, kind: str) -> Any:
        """What it names. A package that does not import is an error of one line that names it."""
        module, _, attr = self.value.partition(":")
        note_foreign(module, f"of the installed package {self.distribution}")
        try:
            found = import_module(module)
            for part in filter(None, attr.split(".")):
                found = getattr(found, part)
            return found
        except (Exception, SystemExit) as error:  # it is another program: anything may come out of it
            raise self.error(kind, f"does not load: {type(error).__name__}: {error}") from error

    def error(self, kind: str, problem: str) -> ConfigError:
        return ConfigError(
            f"{kind} {self.name!r} of the installed package {self.distribution} {problem}",
            where=f"entry point {self.group}: {self.name} = {self.value}",
            fix=f"update or uninstall {self.distribution.partition(' ')[0]}",
        )


def installed_plugins(group: str) -> list[Plugin]:
    """The entry points of a group, of every distribution on sys.path."""
    return [plugin for plugin in _all_plugins(tuple(sys.path)) if plugin.group == group]


@lru_cache(maxsize=4)
def _all_plugins(path: tuple[str, ...]) -> tuple[Plugin, ...]:
    """path: sys.path as it is now, as key of the cache."""
    from importlib.metadata import entry_points

    points, found = entry_points(), []
    for group in sorted(group for group in points.groups if group.startswith("erniekit.")):
        for entry in points.select(group=group):
            dist = entry.dist
            named = f"{dist.metadata['Name']} {dist.version}" if dist is not None else "(unknown)"
            found.append(Plugin(group, entry.name, entry.value, named))
    return tuple(found)


@lru_cache
def _warn_clash(kind: str, plugin: Plugin, others: tuple[str, ...]) -> None:
    """Once a process for each."""
    owner = f"also brought by {', '.join(others)}" if others else "built in"
    warn(f"{plugin.distribution}: its {kind} {plugin.name!r} is not used, that name is {owner}")


class Registry:
    """group: of entry points that add to the table. check: (name, what an entry point gave) -> what is wrong with it,
    or nothing."""

    def __init__(
        self,
        kind: str,
        entries: dict[str, str],
        group: str = "",
        check: Callable[[str, Any], str] | None = None,
    ) -> None:
        self.kind, self.group = kind, group
        self._entries, self._check = dict(entries), check

    def __contains__(self, name: str) -> bool:
        return name in self._entries or name in self.installed()

    def __iter__(self) -> Iterator[str]:
        """The names of the table itself."""
        return iter(self._entries)

    def names(self) -> list[str]:
        """The table's and those that installed packages add."""
        return [*self._entries, *self.installed()]

    def installed(self) -> dict[str, Plugin]:
        """What installed packages add. A name that is built in, or that two packages bring, is refused with a line."""
        found: dict[str, list[Plugin]] = {}
        for plugin in installed_plugins(self.group) if self.group else ():
            found.setdefault(plugin.name, []).append(plugin)
        for name, plugins in found.items():
            for plugin in plugins if name in self._entries or len(plugins) > 1 else ():
                others = () if name in self._entries else (p.distribution for p in plugins if p is not plugin)
                _warn_clash(self.kind, plugin, tuple(others))
        return {n: plugins[0] for n, plugins in found.items() if n not in self._entries and len(plugins) == 1}

    def distribution(self, name: str) -> str:
        """The package that brings a name; empty where it is built in."""
        return "" if name in self._entries else self.installed()[name].distribution

    def get(self, name: str) -> Any:
        if name in self._entries:
            module, _, attr = self._entries[name].partition(":")
            return getattr(import_module(module), attr)
        plugin = self.installed().get(name)
        if plugin is None:
            known = self.names()
            near = nearest(name, known)
            hint = f"did you mean {near[0]!r}?" if near else "choose one of: " + ", ".join(known)
            raise ConfigError(f"unknown {self.kind} {name!r}", fix=hint)
        found = plugin.load(self.kind)
        if self._check is not None and (problem := self._check(name, found)):
            raise plugin.error(self.kind, problem)
        return found
