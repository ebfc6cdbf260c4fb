"""Weights as they are kept and multiplied. A further kind is one file, and one line in weight_kinds.py or entry point.

Linears, adapted linears and experts hold a `Stored` and get products from `kind_of` it; none depends on which kind it
is.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from erniekit.kernels.stored.base import Agree, Stored, WeightKind
from erniekit.kernels.stored.plain import Plain
from erniekit.kernels.stored.promises import broken_promise
from erniekit.weight_kinds import PLAIN, WEIGHT_KINDS, kinds_of, with_products

_WIDTH = 4096  # columns that a weight's bits are measured with, and up to twice as many: a multiple of any group
_LOADED: dict[str, WeightKind] = {PLAIN: Plain()}


def kind_of(weight: Stored) -> WeightKind:
    """Of a weight that was packed, so that its kind is loaded: compiled code looks it up and imports nothing."""
    return _LOADED[weight.kind]


def kind_named(name: str) -> WeightKind:
    if name not in _LOADED:
        kind = WEIGHT_KINDS.get(name)()
        if WEIGHT_KINDS.distribution(name) and (problem := broken_promise(kind)):
            raise WEIGHT_KINDS.installed()[name].error(WEIGHT_KINDS.kind, problem)
        _LOADED[name] = kind
    return _LOADED[name]


def multiplied_in_fp8(base: str, products: str, role: str) -> bool:
    """Whether frozen weights of a role are, by the keys frozen_base and frozen_products."""
    held, *_ = with_products(kinds_of(base).get(role, PLAIN), products)
    return kind_named(held).rows_in_fp8


def add_kind(kind: WeightKind) -> str:
    """A kind that has settings is made where they are; its name, by which weights refer to it, contains them all."""
    return _LOADED.setdefault(kind.name, kind).name


@lru_cache
def bits_of(name: str) -> float:
    """Bits of a weight of a kind, scales of groups included, those of rows not: two rows of different lengths are
    packed and compared."""
    kind = kind_named(name)
    # Square: what a kind asks of the number of rows is met as well.
    width = next((w for w in range(_WIDTH, 2 * _WIDTH) if kind.fits(w, w) and kind.fits(2 * w, 2 * w)), None)
    if width is None:
        return 16.0  # weights that a kind does not fit stay as they are
    return 8 * (_bytes_of_row(kind, 2 * width) - _bytes_of_row(kind, width)) / width


def _bytes_of_row(kind: WeightKind, width: int) -> int:
    packed = kind.pack(torch.zeros(1, width, dtype=torch.bfloat16))
    return sum(t.nbytes for t in packed[:3] if t is not None)


__all__ = [
    "PLAIN", "Agree", "Stored", "WeightKind", "add_kind", "bits_of", "kind_named", "kind_of", "multiplied_in_fp8",
]  # fmt: skip
