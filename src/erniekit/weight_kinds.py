"""The kinds of stored weights by name: which exist, without importing torch. Read by config/ and by kernels/stored.

A further kind is one class (kernels/stored/base.py has its interface) and one entry point of the group
`erniekit.weight_kinds`, or one line here; `frozen_base: NAME` then uses it.
"""

from __future__ import annotations

from typing import Any

from erniekit.registry import Registry

PLAIN = "plain"  # fp32 or 16 bit, the only kind that is trained
BF16 = "bf16"  # what a user writes for it


def _problem(name: str, kind: Any) -> str:
    """What is wrong with a kind that an installed package brings."""
    if not isinstance(kind, type) or not hasattr(kind, "turned_product"):
        return "is not a subclass of WeightKind"
    if (own := getattr(kind, "name", "")) != name:
        return f"names itself {own!r}: its `name` must be the entry point's"
    missing = [each for each in ("pack", "unpack") if getattr(kind, each).__qualname__ == f"WeightKind.{each}"]
    return f"does not define {' and '.join(missing)}" if missing else ""


WEIGHT_KINDS = Registry(
    "kind of weights",
    {
        PLAIN: "erniekit.kernels.stored.plain:Plain",
        "fp8": "erniekit.kernels.stored.fp8:Fp8",
        "int8": "erniekit.kernels.stored.int8:Int8",
        "int4": "erniekit.kernels.stored.int4:Int4",
        "int4-fp8": "erniekit.kernels.stored.int4:Int4InFp8",
        "int4-group": "erniekit.kernels.stored.int4_group:Int4Group",
        "mxfp4": "erniekit.kernels.stored.mxfp4:Mxfp4",
        "mxfp4-fp8": "erniekit.kernels.stored.mxfp4:Mxfp4InFp8",
        "nf4": "erniekit.kernels.stored.nf4:Nf4",
    },
    group="erniekit.weight_kinds",
    check=_problem,
)
# The same bytes, multiplied in fp8: `frozen_products: fp8` takes the one for the other.
IN_FP8 = {"fp8": "fp8", "int4": "int4-fp8", "mxfp4": "mxfp4-fp8"}

# Mixes by name: the kind of each role a weight can have (`role_of`).
ROLES = ("attention", "mlp", "experts", "shared")
# By a part of a weight's name, the first that matches. Vision layers have roles that no base packs.
_BY_PART = {"tower": "tower", "resampler": "resampler", "experts": "experts", "shared": "shared", "attn": "attention"}
MIXES = {"wint4/8": {"attention": "int8", "mlp": "int8", "experts": "int4", "shared": PLAIN}}

BASES = (BF16, *(kind for kind in WEIGHT_KINDS if kind not in (PLAIN, *set(IN_FP8.values()) - {"fp8"})), *MIXES)
# Values of `quantization` that the embedded engine packs by -> the base.
SERVED = {"wint8": "int8", "wint4": "wint4/8", "wint4/8": "wint4/8"}


def role_of(name: str) -> str:
    """Of a weight, or a layer, by our name of it; as models/costs.py has it."""
    return next((_BY_PART[part] for part in name.split(".") if part in _BY_PART), "mlp")


def kinds_of(base: str) -> dict[str, str]:
    """The kind of each role, of what a user calls a base: a kind, a mix, or bf16."""
    return MIXES.get(base) or dict.fromkeys(ROLES, PLAIN if base == BF16 else base)


def with_products(kind: str, products: str) -> tuple[str, ...]:
    """How a weight of a kind may be held for products in bf16 or fp8, the first choice first: fp8 has widths of its
    own."""
    return tuple(dict.fromkeys((IN_FP8.get(kind, kind), kind))) if products == "fp8" else (kind,)
