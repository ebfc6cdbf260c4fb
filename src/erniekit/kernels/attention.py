"""Causal attention over documents that share a row, never across them and never with a dense mask.

Called by models/layers/attention.py. B batch, L length, N heads, D head_dim, T = B * L tokens.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from erniekit.kernels.precision import at_least_fp32
from erniekit.kernels.selection import AttentionFacts, documents_apart

MASKED = 64 * 1024 * 1024  # scores at once: 256 MiB in fp32
PADDED = 4  # up to so many keys more per query, unused queries are cheaper than a mask


class Keys(Protocol):
    """What data.types.SharedKeys has: the keys of every document, where those are not its own tokens."""

    @property
    def index(self) -> torch.Tensor: ...

    @property
    def bounds(self) -> torch.Tensor: ...

    @property
    def longest(self) -> int: ...

    @property
    def tokens(self) -> int | None: ...

    @property
    def copies(self) -> int: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    max_doc: int | None = None,
    backend: str = "auto",
    shared: Keys | None = None,
) -> torch.Tensor:
    """q [B, L, Nq, D]; k, v [B, L, Nkv, D], longer where keys are shared -> [B, L, Nq, D].

    cu_seqlens: int32 [docs + 1] bounds in the flattened tokens; None = each row is one document.
    shared: document s looks at the keys index[bounds[s]:bounds[s + 1]] of the flattened tokens instead of its own; its
    last query sees all of them, the one before all but the last, and so on.
    """
    assert shared is None or cu_seqlens is not None, "shared keys belong to the documents of cu_seqlens"
    if backend == "reference":
        return reference(q, k, v, cu_seqlens, shared)
    if cu_seqlens is None:
        return _causal(q, k, v)
    k, v = (t.flatten(0, 1) for t in (k, v))
    key_bounds = cu_seqlens
    if shared is not None:
        # Not index_select: the backward of k[index] adds up a prompt's gradients in one order on any device.
        k, v, key_bounds = k[shared.index], v[shared.index], shared.bounds
    if backend == "auto":
        backend = _which(q, k)
    if backend in ("flash", "varlen"):
        longest = max_doc if max_doc is not None else int(cu_seqlens.diff().max())
        return _varlen(q, k, v, cu_seqlens, key_bounds, longest, longest if shared is None else shared.longest)
    if backend == "masked":
        return _with_a_mask(q, k, v, cu_seqlens, key_bounds)
    return _per_document(q, k, v, cu_seqlens, key_bounds)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, shared: Keys | None = None
) -> torch.Tensor:
    """The definition, with the mask written out: the oracle for every other path. O(L^2) memory."""
    if shared is not None:
        assert cu_seqlens is not None
        flat_q, flat_k, flat_v = (t.flatten(0, 1)[None] for t in (q, k, v))
        allowed = _written_out(cu_seqlens, shared, flat_q.shape[1], flat_k.shape[1])
        return _masked(flat_q, flat_k, flat_v, allowed).view_as(q)
    B, L = q.shape[:2]
    token = torch.arange(B * L, device=q.device).view(B, L)
    allowed = token[:, :, None] >= token[:, None, :]
    if cu_seqlens is not None:
        doc = torch.searchsorted(cu_seqlens.to(token.device), token.contiguous(), right=True)
        allowed = allowed & (doc[:, :, None] == doc[:, None, :])
    return _masked(q, k, v, allowed)


def _masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    Nq, D = q.shape[2:]
    k, v = (t.repeat_interleave(Nq // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("blnd,bmnd->bnlm", q, k) * D**-0.5
    weights = at_least_fp32(scores).masked_fill(~allowed[:, None], float("-inf")).softmax(-1).to(q.dtype)
    return torch.einsum("bnlm,bmnd->blnd", weights, v)


def _written_out(cu_seqlens: torch.Tensor, shared: Keys, queries: int, keys: int) -> torch.Tensor:
    """bool [1, queries, keys]: which query sees which key."""
    allowed = torch.zeros(1, queries, keys, dtype=torch.bool, device=shared.index.device)
    starts, key_starts = cu_seqlens.tolist(), shared.bounds.tolist()
    for s, (start, end) in enumerate(pairwise(starts)):
        visible = shared.index[key_starts[s] : key_starts[s + 1]]
        for query in range(start, end):
            allowed[0, query, visible[: len(visible) - (end - 1 - query)]] = True
    return allowed


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _per_document(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, key_bounds: torch.Tensor
) -> torch.Tensor:
    """One plain causal call a document: exact anywhere, and the cheapest way on a CPU. k, v are flat."""
    queries = q.flatten(0, 1).split(bounds.diff().tolist())
    lengths = key_bounds.diff().tolist()
    parts = [_ends_aligned(a, b, c) for a, b, c in zip(queries, k.split(lengths), v.split(lengths))]
    return torch.cat(parts).view_as(q)


def _ends_aligned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [n, Nq, D] are the last n places of k, v [m, Nkv, D]; torch's own causal flag would align their starts."""
    n, earlier = q.shape[0], k.shape[0] - q.shape[0]
    if earlier > PADDED * n:
        mask = torch.ones(n, k.shape[0], dtype=torch.bool, device=q.device).tril(earlier)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)[0].transpose(0, 1)
    return _causal(F.pad(q, (0, 0, 0, 0, earlier, 0))[None], k[None], v[None])[0, earlier:]


def _with_a_mask(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, key_bounds: torch.Tensor
) -> torch.Tensor:
    """Every query against all keys, with a mask of what each sees, some queries at a time: no wait, and at most
    MASKED scores at once where a device forms them. k, v are flat."""
    flat = q.flatten(0, 1)
    tokens, keys, heads = flat.shape[0], k.shape[0], flat.shape[1]
    key = torch.arange(keys, device=q.device)
    key_doc = torch.searchsorted(key_bounds.to(key.dtype), key, right=True)
    step = max(1, min(tokens, MASKED // max(1, keys * heads)))
    k, v = (t.transpose(0, 1)[None] for t in (k, v))
    out = []
    for at in range(0, tokens, step):
        query = torch.arange(at, min(at + step, tokens), device=q.device)
        doc = torch.searchsorted(bounds.to(query.dtype), query, right=True)
        # A document's last query sees its last key, the one before it the key before that.
        last_key = key_bounds[doc].long() - (bounds[doc].long() - query)
        mask = (key_doc[None] == doc[:, None]) & (key[None] <= last_key[:, None])
        part = flat[at : at + step].transpose(0, 1)[None]
        out.append(F.scaled_dot_product_attention(part, k, v, mask, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(out).view_as(q)


def _which(q: torch.Tensor, k: torch.Tensor) -> str:
    """By selection.py. k is flat."""
    group = q.shape[2] // max(1, k.shape[1])
    return documents_apart(AttentionFacts(q.device, group, q.shape[-1], dtype=q.dtype, apart=True))


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    longest: int,
    longest_keys: int,
) -> torch.Tensor:
    """FlashAttention aligns the ends where a document has more keys than queries. k, v are flat."""
    from torch.nn.attention.varlen import varlen_attn

    repeat = q.shape[2] // k.shape[1]
    # torch 2.11's varlen_attn has no enable_gqa; FlashAttention-2 itself takes fewer kv heads.
    options: dict[str, Any] = {"enable_gqa": True} if repeat > 1 and _varlen_supports_gqa() else {}
    if repeat > 1 and not options:
        k, v = (t.repeat_interleave(repeat, dim=1) for t in (k, v))
    out: Any = varlen_attn(
        q.flatten(0, 1), k, v, bounds, key_bounds, longest, longest_keys, window_size=(-1, 0), **options
    )
    result: torch.Tensor = out.view_as(q)
    return result


def _varlen_supports_gqa() -> bool:
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
