"""Numbers of the hash that rounds 16-bit moments up or down by chance: the same in torch and in the Triton kernel.

Used by kernels/adamw.py and kernels/triton/adamw.py.
"""

from __future__ import annotations

# What an update's number and a moment are multiplied by, and (shift, factor) of two rounds after which every high bit
# depends on every bit of what was given.
SALTS = (0x9E3779B1, 0x85EBCA6B)
SPREADS = ((16, 0x7FEB352D), (15, 0x846CA68B))
