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

    def token_losses(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        bias: torch.Tensor | None,
        ignore: int,
        chunk: int,
    ) -> torch.Tensor:
        """hidden [B, L or its slice, H], labels [B, L] -> the loss of each token, fp32 [B, L], alike on every rank."""
        kept = (labels.flatten() != ignore).nonzero().squeeze(-1)
        rows = self._whole(hidden).flatten(0, 1).index_select(0, kept)
        targets = labels.flatten().index_select(0, kept) - self.start
        losses = _VocabTokenLosses.apply(rows, weight, bias, targets, self.group, chunk)
        return losses.new_zeros(labels.numel()).index_copy(0, kept, losses).view(labels.shape)


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


class _VocabTokenLosses(torch.autograd.Function):
    """One small exchange a chunk, in forward: each rank's logsumexp and the target's logit, 0 where it is not here.

    Backward computes the local logits again; with the whole logsumexp at hand it needs nobody.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        group: ProcessGroup,
        chunk: int,
    ) -> torch.Tensor:
        here = (targets >= 0) & (targets < weight.shape[0])
        index = targets.clamp(0, max(0, weight.shape[0] - 1))
        norms = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        losses = torch.empty_like(norms)
        for at in range(0, hidden.shape[0], chunk):
            rows = slice(at, at + chunk)
            mine = torch.stack((torch.full_like(norms[rows], float("-inf")), torch.zeros_like(norms[rows])))
            if weight.shape[0]:  # more ranks than vocabulary leave some without
                logits = F.linear(hidden[rows], weight, bias).float()
                mine[0] = logits.logsumexp(-1)
                mine[1] = logits.gather(1, index[rows, None]).squeeze(1).masked_fill(~here[rows], 0.0)
            parts = [torch.empty_like(mine) for _ in range(group.size())]
            dist.all_gather(parts, mine, group=group)
            everyone = torch.stack(parts)
            norms[rows] = everyone[:, 0].logsumexp(0)
            losses[rows] = norms[rows] - everyone[:, 1].sum(0)
        ctx.save_for_backward(hidden, weight, bias, index, here, norms)
        ctx.chunk = chunk
        return losses

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        hidden, weight, bias, index, here, norms = ctx.saved_tensors
        want_x, want_w, want_b = ctx.needs_input_grad[:3]
        grad_x = torch.zeros_like(hidden) if want_x else None
        grad_w = torch.zeros_like(weight, dtype=torch.float32) if want_w else None
        grad_b = torch.zeros_like(bias, dtype=torch.float32) if want_b else None
        for at in range(0, hidden.shape[0] if weight.shape[0] else 0, ctx.chunk):
            rows = slice(at, at + ctx.chunk)
            x, upstream = hidden[rows], grad_out[rows, None].float()
            grad = F.linear(x, weight, bias).float().sub_(norms[rows, None]).exp_().mul_(upstream)
            grad.scatter_add_(1, index[rows, None], -upstream * here[rows, None])
            low = grad.to(hidden.dtype)
            if grad_x is not None:
                grad_x[rows] = low @ weight  # this rank's part: copy_to or gather_from sums them
            if grad_w is not None:
                grad_w += (low.t() @ x).float()
            if grad_b is not None:
                grad_b += grad.sum(0)
        return (
            grad_x,
            None if grad_w is None else grad_w.to(weight.dtype),
            None if grad_b is None else grad_b.to(bias.dtype),
            *(None,) * 3,
        )
