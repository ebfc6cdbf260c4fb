"""Embedding, logits and loss over a vocabulary that is dealt out to the tensor-parallel ranks.

tensor.py puts these in the places of the local ones. T tokens, H hidden, v local vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

from erniekit.parallel.collectives import copy_to, gather_from


class VocabHead(nn.Module):
    """Stands where models.layers.head.LocalHead stands: logits are joined, the loss never needs them joined."""

    def __init__(self, group: ProcessGroup, sizes: list[int], rank: int, sequence_parallel: bool) -> None:
        super().__init__()
        self.group, self.sizes, self.start = group, sizes, sum(sizes[:rank])
        self.sequence_parallel = sequence_parallel

    def _whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, L, H] whose gradient every rank gets summed."""
        if self.sequence_parallel:
            return gather_from(hidden, 1, self.group)
        return copy_to(hidden, self.group)

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """All logits on every rank; for probes and generation, so without gradient."""
        with torch.no_grad():
            local = F.linear(self._whole(hidden), weight, bias)
            widest = max(self.sizes)
            padded = F.pad(local, (0, widest - local.shape[-1])).contiguous()
            parts = [torch.empty_like(padded) for _ in self.sizes]
            dist.all_gather(parts, padded, group=self.group)
            return torch.cat([p[..., :n] for p, n in zip(parts, self.sizes)], dim=-1)

    def loss(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        bias: torch.Tensor | None,
        ignore: int,
        chunk: int,
    ) -> torch.Tensor:
        flat = self._whole(hidden).flatten(0, 1)
        kept = (labels.flatten() != ignore).nonzero().squeeze(-1)
        if kept.numel() == 0:
            return (flat.sum() + weight.sum()) * 0.0
        rows, targets = flat.index_select(0, kept), labels.flatten().index_select(0, kept)
        return _VocabCrossEntropy.apply(rows, weight, bias, targets, self.start, self.group, chunk)


class _VocabCrossEntropy(torch.autograd.Function):
    """Gradients are formed chunk by chunk in forward; three small all-reduces a chunk: maximum, sum, target."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        start: int,
        group: ProcessGroup,
        chunk: int,
    ) -> torch.Tensor:
        want_x, want_w, want_b = ctx.needs_input_grad[:3]
        grad_x = torch.empty_like(hidden) if want_x else None
        grad_w = torch.zeros_like(weight, dtype=torch.float32) if want_w else None
        grad_b = torch.zeros_like(bias, dtype=torch.float32) if want_b and bias is not None else None
        total = hidden.new_zeros((), dtype=torch.float32)
        for at in range(0, hidden.shape[0], chunk):
            rows = slice(at, at + chunk)
            x, local = hidden[rows], labels[rows] - start
            logits = F.linear(x, weight, bias).float()
            here = (local >= 0) & (local < weight.shape[0])
            index = local.clamp(0, max(0, weight.shape[0] - 1))[:, None]
            highest = logits.amax(-1) if logits.shape[-1] else logits.new_full((x.shape[0],), float("-inf"))
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            shifted = (logits - highest[:, None]).exp()
            picked = (logits.gather(1, index).squeeze(1) if logits.shape[-1] else highest * 0.0).masked_fill(~here, 0.0)
            sums = torch.stack((shifted.sum(-1), picked))
            dist.all_reduce(sums, group=group)
            total += (sums[0].log() + highest - sums[1]).sum()
            if not (want_x or want_w or want_b):
                continue
            grad = shifted / sums[0][:, None]
            if logits.shape[-1]:
                grad.scatter_add_(1, index, -here.float()[:, None])
            low = grad.to(hidden.dtype)
            if grad_x is not None:
                grad_x[rows] = low @ weight  # this rank's part: copy_to or gather_from sums them
            if grad_w is not None:
                grad_w += (low.t() @ x).float()
            if grad_b is not None:
                grad_b += grad.sum(0)
        ctx.save_for_backward(grad_x, grad_w, grad_b)
        ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        grad_x, grad_w, grad_b = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if grad_x is None else (grad_x * grad_out).to(grad_x.dtype),
            None if grad_w is None else (grad_w * grad_out).to(weight_dtype),
            None if grad_b is None else (grad_b * grad_out).to(bias_dtype),
            *(None,) * 4,
        )
