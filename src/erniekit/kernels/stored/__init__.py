"""Weights as they are kept and multiplied. A further kind is one file here, or anywhere, and one `register`.

Linears, adapted linears and experts hold a `Stored` and ask `kind_of` it for products; none asks which kind it is.
"""

from __future__ import annotations

from erniekit.kernels.stored.base import PLAIN, Agree, Stored, WeightKind
from erniekit.kernels.stored.fp8 import Fp8
from erniekit.kernels.stored.plain import Plain

_KINDS: dict[str, WeightKind] = {}


def register(kind: WeightKind) -> None:
    _KINDS[kind.name] = kind


for _kind in (Plain(), Fp8()):
    register(_kind)


def kind_of(weight: Stored) -> WeightKind:
    return _KINDS[weight.kind]


def kind_named(name: str) -> WeightKind:
    return _KINDS[name]


__all__ = ["PLAIN", "Agree", "Stored", "WeightKind", "kind_named", "kind_of", "register"]
