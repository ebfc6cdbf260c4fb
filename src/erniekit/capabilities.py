"""What the accelerator of this process lacks, by capability, each with its reason. Written by devices/ when a device is
picked (as its vendor documents, and as probes found), read by kernels/. One process has one accelerator.

Imports no torch; has() is read inside compiled layers, so it is a plain look-up.
"""

from __future__ import annotations

from collections.abc import Mapping

# capability -> what it is, and what a run does without it.
CAPABILITIES: dict[str, tuple[str, str]] = {
    "bf16": ("products in bf16", "computed in fp32"),
    "triton": ("Triton kernels", "kernels in plain torch, layers are not compiled"),
    "grouped": ("grouped product of experts", "products of blocks of rows, without waiting for the device"),
    "varlen": ("attention over packed documents", "attention with a mask, in pieces"),
    "wide": ("16-bit products with fp32 results", "products in fp32"),
    "fp8": ("products in fp8", "compute_type fp8 and fp8 weights are refused or computed in 16 bits"),
    "graphs": ("recorded graphs", "every step is launched kernel by kernel"),
    "nvidia": ("kernels for NVIDIA cards alone (FlashAttention-4, cuDNN, QuACK)", "the others are chosen from"),
}

_lacks: dict[str, str] = {}
_version = 0


def set_lacks(lacks: Mapping[str, str]) -> None:
    """From now on in this process."""
    unknown = set(lacks) - set(CAPABILITIES)
    assert not unknown, f"no capability is called {', '.join(sorted(unknown))}"
    if dict(lacks) != _lacks:
        global _version
        _version += 1
        _lacks.clear()
        _lacks.update(lacks)


def version() -> int:
    """Changes when what is lacked does: choices made before are stale."""
    return _version


def why_not(name: str) -> str | None:
    return _lacks.get(name)


def has(name: str) -> bool:
    return name not in _lacks


def line(name: str, reason: str) -> str:
    """For people: what is missing, why, and what is done instead."""
    what, instead = CAPABILITIES[name]
    return f"no {what} here ({reason}): {instead}"
