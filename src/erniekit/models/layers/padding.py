"""How padding attended in ERNIEKit: fully masked, so evenly to its whole row. For `compat: erniekit`.

It matters where there are router losses: those read padding too. Put around the inner attention by
recipes/expert_layers.py. B batch, L length, N heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class EvenPadding(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: Any) -> torch.Tensor:
        out_BLND: torch.Tensor = self.inner(q, k, v, ctx)
        if ctx.real is None or ctx.record is None:
            return out_BLND
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
        scores = torch.einsum("blnd,bmnd->bnlm", q, k) * q.shape[-1] ** -0.5
        # The mask drowned every score, so all weigh the same; yet gradients passed through it.
        weights = (scores - scores.detach()).softmax(-1)
        even_BLND = torch.einsum("bnlm,bmnd->blnd", weights, v)
        return torch.where(ctx.real[..., None, None], out_BLND, even_BLND)
