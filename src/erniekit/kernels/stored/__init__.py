"""Weights as they are kept and multiplied. A further kind is one file, and one line in weight_kinds.py or entry point.

Linears, adapted linears and experts hold a `Stored` and get products from `kind_of` it; none depends on which kind it
is.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from erniekit.kernels.stored.base import Agree, Stored, WeightKind
from erniekit.kernels.stored.plain import Plain
from erniekit.weight_kinds import PLAIN, WEIGHT_KINDS

_WIDTH = 4096  # a multiple of every kind's group
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


@lru_cache
def bits_of(name: str) -> float:
    """Bits of a weight of a kind, scales of groups included, those of rows not: two rows of different lengths are
    packed and compared."""
    short, long = (_bytes_of_row(kind_named(name), width) for width in (_WIDTH, 2 * _WIDTH))
    return 8 * (long - short) / _WIDTH


def _bytes_of_row(kind: WeightKind, width: int) -> int:
    packed = kind.pack(torch.zeros(1, width, dtype=torch.bfloat16))
    return sum(t.nbytes for t in packed[:3] if t is not None)


__all__ = ["PLAIN", "Agree", "Stored", "WeightKind", "add_kind", "bits_of", "kind_named", "kind_of"]
