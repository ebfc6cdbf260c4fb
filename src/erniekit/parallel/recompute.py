"""Activation checkpointing: forget what a layer computed, and compute it again in backward. Called by recipes/build.py.

full = whole decoder layers, full_attn = their attention block, core_attn (or selective) = only the weightless
inner attention.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def apply_recompute(model: nn.Module, granularity: str, skip_layers: Collection[int] = ()) -> int:
    """Wraps each layer of `model.layers` but those skipped; returns how many."""
    wrapped = 0
    for i, layer in enumerate(model.layers):  # type: ignore[arg-type]
        if i in skip_layers or not hasattr(layer, "attn"):  # a layer of another pipeline stage
            continue
        owner, method = {
            "full": (layer, "forward"),
            "full_attn": (layer, "attend"),
            "core_attn": (layer.attn.inner, "forward"),
            "selective": (layer.attn.inner, "forward"),
        }[granularity]
        setattr(owner, method, _again(getattr(owner, method)))
        wrapped += 1
    return wrapped


def _again(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False)

    return run
