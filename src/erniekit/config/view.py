"""View: what a rule of config.resolve may read, and the two ways it may report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from erniekit.config.compat import COMPAT, Compat
from erniekit.config.note import Note
from erniekit.config.sources import Sources


class View:
    """What a rule may look at: the values so far, and what the user gave."""

    def __init__(self, values: Mapping[str, Any], sources: Sources, command: str) -> None:
        self.values, self.sources, self.command = values, sources, command

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def compat(self) -> Compat:
        return COMPAT[self["compat"]]

    def given(self, name: str) -> bool:
        return name in self.sources.given

    def origin(self, name: str) -> str:
        return self.sources.given[name].origin if self.given(name) else "default"

    def wins(self, a: str, b: str) -> bool:
        """Whether the user's value of `a` wins over `b`: given later; in one file `b` wins, as in ERNIEKit."""
        if not self.given(a):
            return False
        if not self.given(b):
            return True
        one, other = self.sources.given[a], self.sources.given[b]
        return one.order > other.order and not (one.in_file and other.in_file)

    def set(self, name: str, new: Any, reason: str, *, quiet: bool = False) -> Iterator[Note]:
        """A note that changes `name`; none when it already has that value."""
        if self[name] != new:
            yield Note(name, self[name], new, reason, quiet)

    def remark(self, name: str, reason: str) -> Iterator[Note]:
        yield Note(name, self[name], self[name], reason)


Rule = Callable[[View], Iterable[Note]]
