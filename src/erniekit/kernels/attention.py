"""Causal attention over documents that share a row, never across them and never with a dense mask.

Called by models/layers/attention.py. B batch, L length, N heads, D head_dim, T = B * L tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

BACKENDS = ("auto", "sdpa", "varlen", "reference")


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    max_doc: int | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """q [B, L, Nq, D]; k, v [B, L, Nkv, D] -> [B, L, Nq, D].

    cu_seqlens: int32 [docs + 1] bounds in the flattened tokens; None = each row is one document.
    """
    if backend == "reference":
        return reference(q, k, v, cu_seqlens)
    if cu_seqlens is None:
        return _causal(q, k, v)
    if backend == "varlen" or (backend == "auto" and _varlen_fits(q)):
        return _varlen(q, k, v, cu_seqlens, max_doc)
    return _per_document(q, k, v, cu_seqlens)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """The definition, with the mask written out: the oracle for every other path. O(L^2) memory."""
    B, L, Nq, D = q.shape
    k, v = (t.repeat_interleave(Nq // t.shape[2], dim=2) for t in (k, v))
    token = torch.arange(B * L, device=q.device).view(B, L)
    allowed = token[:, :, None] >= token[:, None, :]
    if cu_seqlens is not None:
        doc = torch.searchsorted(cu_seqlens.to(token.device), token.contiguous(), right=True)
        allowed = allowed & (doc[:, :, None] == doc[:, None, :])
    scores = torch.einsum("blnd,bmnd->bnlm", q, k) * D**-0.5
    weights = scores.float().masked_fill(~allowed[:, None], float("-inf")).softmax(-1).to(q.dtype)
    return torch.einsum("bnlm,bmnd->blnd", weights, v)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _per_document(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """One plain causal call a document: exact anywhere, and the cheapest way on a CPU."""
    lengths = cu_seqlens.diff().tolist()
    flat = [t.flatten(0, 1).split(lengths) for t in (q, k, v)]
    parts = [_causal(a[None], b[None], c[None])[0] for a, b, c in zip(*flat)]
    return torch.cat(parts).view_as(q)


def _varlen_fits(q: torch.Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0


def _varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_doc: int | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    longest = max_doc if max_doc is not None else int(cu_seqlens.diff().max())
    repeat = q.shape[2] // k.shape[2]
    # torch 2.11's varlen_attn has no enable_gqa; FlashAttention-2 itself takes fewer kv heads.
    flat_q, flat_k, flat_v = (t.flatten(0, 1) for t in (q, k, v))
    options: dict[str, Any] = {"enable_gqa": True} if repeat > 1 and _varlen_knows_gqa() else {}
    if repeat > 1 and not options:
        flat_k, flat_v = (t.repeat_interleave(repeat, dim=1) for t in (flat_k, flat_v))
    out: Any = varlen_attn(
        flat_q, flat_k, flat_v, cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0), **options
    )
    return out.view_as(q)


def _varlen_knows_gqa() -> bool:
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
