"""The kinds of stored weights by name: which exist, without importing torch. Read by config/ and by kernels/stored.

A further kind is one class (kernels/stored/base.py has its interface) and one entry point of the group
`erniekit.weight_kinds`, or one line here; `frozen_base: NAME` then uses it.
"""

from __future__ import annotations

from erniekit.registry import Registry

PLAIN = "plain"  # fp32 or 16 bit, the only kind that is trained
BF16 = "bf16"  # what a user writes for it
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
)
# The same bytes, multiplied in fp8: `frozen_products: fp8` takes the one for the other.
IN_FP8 = {"fp8": "fp8", "int4": "int4-fp8", "mxfp4": "mxfp4-fp8"}

# Mixes by name: the kind of each role a weight can have (by lora/frozen_base.py).
ROLES = ("attention", "mlp", "experts", "shared")
MIXES = {"wint4/8": {"attention": "int8", "mlp": "int8", "experts": "int4", "shared": PLAIN}}

# Bits of a weight, scales of groups included, those of rows not: what decisions on memory count. Unknown kinds: as 16.
BITS = {"fp8": 8.0, "int8": 8.0, "int4": 4.0, "int4-group": 4.25, "mxfp4": 4.25, "nf4": 4.125}

BASES = (BF16, *(kind for kind in WEIGHT_KINDS if kind not in (PLAIN, *set(IN_FP8.values()) - {"fp8"})), *MIXES)
# Values of `quantization` that the embedded engine packs by -> the base.
SERVED = {"wint8": "int8", "wint4": "wint4/8", "wint4/8": "wint4/8"}


def kinds_of(base: str) -> dict[str, str]:
    """The kind of each role, of what a user calls a base: a kind, a mix, or bf16."""
    return MIXES.get(base) or dict.fromkeys(ROLES, PLAIN if base == BF16 else base)


def with_products(kind: str, products: str) -> tuple[str, ...]:
    """How a weight of a kind may be held for products in bf16 or fp8, the first choice first: fp8 has widths of its
    own."""
    return tuple(dict.fromkeys((IN_FP8.get(kind, kind), kind))) if products == "fp8" else (kind,)


def multiplied_in_fp8(base: str, products: str, role: str) -> bool:
    """Whether frozen weights of a role are, by the keys frozen_base and frozen_products."""
    kind = kinds_of(base).get(role, PLAIN)
    return kind == "fp8" or (products == "fp8" and kind in IN_FP8)
