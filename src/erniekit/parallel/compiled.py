"""torch.compile of decoder layers. Used by apply.py; `eager` for the odd batch of another shape."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

SHAPES = 64  # programs of one layer's code at most: rows of evaluation, packs of very many documents


def compile_layers(part: nn.Module, one_graph: bool) -> None:
    """Each decoder layer as a whole: they are alike, so one compilation serves them all. one_graph: nothing in it may
    fall back to Python, which on one card nothing does."""
    import torch._dynamo.config  # seconds: only where something is compiled

    torch._dynamo.config.recompile_limit = max(SHAPES, torch._dynamo.config.recompile_limit)  # a limit met ends the run
    for layer in part.layers:  # type: ignore[union-attr]
        if hasattr(layer, "attn"):
            layer.forward = torch.compile(layer.forward, fullgraph=one_graph, dynamic=False if one_graph else None)


_eager = False


def is_eager() -> bool:
    return _eager


@contextmanager
def eager() -> Iterator[None]:
    """Compiled layers run as they are written: a batch of another shape is not worth a compilation."""
    global _eager
    before, _eager = _eager, True
    try:
        # Where torch's compiler was never imported nothing is compiled, and asking it would import it.
        with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
            yield
    finally:
        _eager = before
