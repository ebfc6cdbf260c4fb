"""The kinds of stored weights by name: which exist, without importing torch. Read by config/ and by kernels/stored.

A further kind is one class (kernels/stored/base.py says what it must have) and one entry point of the group
`erniekit.weight_kinds`, or one line here; `frozen_base: NAME` then uses it.
"""

from __future__ import annotations

from erniekit.registry import Registry

PLAIN = "plain"  # fp32 or 16 bit, the only kind that is trained
WEIGHT_KINDS = Registry(
    "kind of weights",
    {PLAIN: "erniekit.kernels.stored.plain:Plain", "fp8": "erniekit.kernels.stored.fp8:Fp8"},
    group="erniekit.weight_kinds",
)
