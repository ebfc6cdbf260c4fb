"""Weights as they are kept and multiplied. A further kind is one file, and one line in weight_kinds.py or entry point.

Linears, adapted linears and experts hold a `Stored` and get products from `kind_of` it; none depends on which kind it
is.
"""

from __future__ import annotations

from erniekit.kernels.stored.base import Agree, Stored, WeightKind
from erniekit.kernels.stored.plain import Plain
from erniekit.weight_kinds import PLAIN, WEIGHT_KINDS

_LOADED: dict[str, WeightKind] = {PLAIN: Plain()}


def kind_of(weight: Stored) -> WeightKind:
    """Of a weight that was packed, so that its kind is loaded: compiled code looks it up and imports nothing."""
    return _LOADED[weight.kind]


def kind_named(name: str) -> WeightKind:
    if name not in _LOADED:
        _LOADED[name] = WEIGHT_KINDS.get(name)()
    return _LOADED[name]


def add_kind(kind: WeightKind) -> str:
    """A kind that has settings is made where they are; its name, by which weights refer to it, contains them all."""
    return _LOADED.setdefault(kind.name, kind).name


__all__ = ["PLAIN", "Agree", "Stored", "WeightKind", "add_kind", "kind_named", "kind_of"]
