"""Decoder layers replayed as CUDA graphs: where a step is so short that the host's launches would take longer than the
device's work. Used by apply.py. Embedding, head and loss stay outside: how many tokens are trained differs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from erniekit.kernels.packed_attention import Packs
from erniekit.parallel.compiled import is_eager

SHAPES = 2  # that are recorded; each keeps the memory of its activations


class GraphedLayers:
    """In place of a model's `run_layers`. What it cannot replay runs as before: other shapes, evaluation, documents
    that share keys, layers that tell of themselves."""

    def __init__(self, model: Any, rows: int, length: int, several: bool) -> None:
        """rows, length: of the batches to come. several: micro-batches a step; a replay writes gradients where the one
        before wrote them, so each is copied first."""
        self.model, self.plain, self.shape, self.several = model, model.run_layers, (rows, length), several
        self.recorded: dict[Any, Any] = {}

    def __call__(self, x_BLH: torch.Tensor, ctx: Any) -> torch.Tensor:
        if not self._fits(x_BLH, ctx):
            return self.plain(x_BLH, ctx)
        key = (ctx.kernel, None if ctx.packs is None else ctx.packs.bounds.shape)
        if key not in self.recorded:
            if len(self.recorded) == SHAPES:
                return self.plain(x_BLH, ctx)
            self.recorded[key] = self._record(x_BLH, ctx)
        bounds = () if ctx.packs is None else (ctx.packs.bounds,)
        out: torch.Tensor = self.recorded[key](x_BLH, ctx.cos, ctx.sin, *bounds)
        return out

    def _fits(self, x_BLH: torch.Tensor, ctx: Any) -> bool:
        if not (torch.is_grad_enabled() and self.model.training) or is_eager():
            return False
        if x_BLH.shape[:2] != self.shape or ctx.record is not None or ctx.shared is not None:
            return False
        return all(layer.attn.inner.takes(x_BLH.dtype, ctx) for layer in self.model.layers)

    def _record(self, x_BLH: torch.Tensor, ctx: Any) -> nn.Module:
        stack: Any = _Stack(self.model.layers, ctx)
        x = x_BLH.detach().clone().requires_grad_(x_BLH.requires_grad)
        sample = [x, ctx.cos.clone(), ctx.sin.clone()]
        if ctx.packs is not None:
            sample.append(ctx.packs.bounds.clone())
        stack = torch.cuda.make_graphed_callables(stack, tuple(sample))
        torch.cuda.empty_cache()  # what the rehearsals left in memory that a graph cannot use
        if self.several and not self.recorded:
            for param in stack.parameters():
                if param.requires_grad:
                    param.register_hook(torch.Tensor.clone)
        graphed: nn.Module = stack
        return graphed


class _Stack(nn.Module):
    """The layers as a function of tensors alone."""

    def __init__(self, layers: nn.ModuleList, ctx: Any) -> None:
        super().__init__()
        self.layers, self.like = layers, ctx._replace(cos=None, sin=None, cu_seqlens=None, real=None, packs=None)
        self.sizes = torch.zeros(3, dtype=torch.int64)
        if ctx.packs is not None:
            # A pack to come may have any documents: as many as there is room for, the longest as long as all.
            tokens = ctx.cos.shape[0] * ctx.cos.shape[1]
            self.sizes = torch.tensor([ctx.packs.bounds.numel() - 1, tokens, tokens])

    def forward(self, x_BLH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *bounds: torch.Tensor) -> torch.Tensor:
        packs = Packs(bounds[0], self.sizes) if bounds else None
        ctx = self.like._replace(cos=cos, sin=sin, packs=packs)
        for layer in self.layers:
            x_BLH = layer(x_BLH, ctx)
        return x_BLH
