"""What the functions of a family give, compared with what ModelSpec says: a family of another package that gives
something else is named at once, not where its result is used. Called by spec.py for every ModelSpec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from erniekit.errors import ConfigError
from erniekit.models.config import DecoderConfig
from erniekit.printable import plain

PAGE = "docs/adding-a-model.md"
CONFIGS = ("read_config", "settle", "preprocessed")  # functions that give a DecoderConfig


@dataclass(frozen=True)
class Promised:
    """A function of a family whose result is looked at."""

    family: str
    field: str
    function: Callable[..., Any]

    def __call__(self, *given: Any) -> Any:
        found = self.function(*given)
        if wanted := _not_as_promised(self.field, found):
            raise ConfigError(
                f"`{self.field}` of family {self.family} gave {plain(repr(found), 60)}, not {wanted}",
                where=self.place,
                fix=f"{PAGE} says what each function of a family takes and gives",
            )
        if self.field in CONFIGS and found.family != self.family:  # what is written and read again goes by it
            raise ConfigError(
                f"`{self.field}` of family {self.family} gave the config of another family: {found.family}",
                where=self.place,
                fix=f"DecoderConfig(family={self.family!r}, ...), or dataclasses.replace(found, family=...) ({PAGE})",
            )
        return found

    @property
    def place(self) -> str:
        return f"{getattr(self.function, '__module__', 'SPEC')}, `{self.field}` of family {self.family}"


def promised(family: str, field: str, function: Any) -> Any:
    """The function with its result looked at; None and what cannot be called stay. Families are made from others."""
    inner = function.function if isinstance(function, Promised) else function
    return Promised(family, field, inner) if callable(inner) else inner


def _not_as_promised(field: str, found: Any) -> str:
    """What a function of this name should have given; empty: it did."""
    if field in CONFIGS:
        return "" if isinstance(found, DecoderConfig) else "a DecoderConfig"
    if field == "write_config":
        return "" if isinstance(found, dict) else "a dict"
    if field == "layout_of":
        return "" if isinstance(found, str) else "the name of a layout"
    if field == "names":
        from erniekit.models.names import Entry

        fits = isinstance(found, list) and all(isinstance(entry, Entry) for entry in found)
        return "" if fits else "a list of Entry"
    from torch import nn

    return "" if isinstance(found, nn.Module) else "a torch.nn.Module"
