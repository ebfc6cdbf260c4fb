"""Attention over packed documents on a CUDA card, as one op that compiled layers may hold. Called by models/layers.

Back ends flash4, cudnn (its varlen plan) and flash (FlashAttention-2): selection.py chooses; attention.py has the
reference. B batch, L length, T = B * L tokens, N heads, D head_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from erniekit.extras import install_command
from erniekit.kernels import cudnn_packed, flash4
from erniekit.kernels.attention import Keys
from erniekit.kernels.available import shapes_of
from erniekit.kernels.selection import AttentionFacts, chosen

ROOM = 64  # documents a pack has room for; more of them take the next multiple, and one compilation more


class Packs(NamedTuple):
    """The documents of a batch in tensors whose shapes stay the same from pack to pack."""

    bounds: torch.Tensor  # int32 [room + 1], in the flattened tokens
    sizes: torch.Tensor  # int64 on the host, read without waiting: documents, the longest, the longest list of keys
    key_index: torch.Tensor | None = None  # int64 [2 * tokens with keys], as data.types.SharedKeys
    key_bounds: torch.Tensor | None = None  # int32 [room + 1]
    # int32 [tokens with keys, copies]: where a token's key is in the lists; -1: nowhere else
    key_places: torch.Tensor | None = None


def packs_of(cu_seqlens: torch.Tensor, longest: int, shared: Keys | None, tokens: int) -> Packs:
    """Padded with documents of no length, and keys without queries. tokens: with queries."""
    documents = cu_seqlens.numel() - 1
    room = -(-documents // ROOM) * ROOM + 1
    bounds = _padded(cu_seqlens, room, tokens)
    if shared is None:
        return Packs(bounds, torch.tensor([documents, longest, longest]))
    keys, there = shared.index.numel(), shared.tokens or tokens
    index = _padded(shared.index, -(-keys // (2 * there)) * 2 * there, 0)
    sizes = torch.tensor([documents, longest, shared.longest])
    places = places_of(shared.index, there, shared.copies)
    return Packs(bounds, sizes, index, _padded(shared.bounds, room, keys), places)


def places_of(index: torch.Tensor, tokens: int, copies: int = 2) -> torch.Tensor:
    """index int64 [keys], in which no token is more than `copies` times -> int32 [tokens, copies]: where it is, -1 for
    fewer times. The host does not wait for the device."""
    token, place = index.sort(stable=True)
    first = torch.searchsorted(token, token)
    which = torch.arange(index.numel(), device=index.device) - first
    out = torch.full((tokens, copies), -1, dtype=torch.int32, device=index.device)
    return out.index_put_((token, which), place.to(torch.int32))


def _padded(x: torch.Tensor, size: int, value: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, size - x.numel()), value=value)


def for_kernel(
    cu_seqlens: torch.Tensor | None,
    longest: int | None,
    shared: Keys | None,
    positions: torch.Tensor,
    group: int,
    head_dim: int,
) -> tuple[str | None, Packs | None]:
    """The back end for a batch and its documents; (None, None) where there is none. Once a batch, not compiled.
    group: query heads to a kv head."""
    if not positions.is_cuda or (cu_seqlens is not None and longest is None):
        return None, None
    kernel = backend_for(positions.device, group, head_dim, packed=cu_seqlens is not None, listed=shared is not None)
    if kernel is None or cu_seqlens is None or longest is None:
        return kernel, None
    return kernel, packs_of(cu_seqlens, longest, shared, positions.numel())


def backend_for(device: torch.device, group: int, head_dim: int, packed: bool, listed: bool = False) -> str | None:
    """By what measured fastest and is right; None: no kernel for a card, torch's own attention document by document."""
    same_bits = torch.are_deterministic_algorithms_enabled()
    facts = AttentionFacts(device, group, head_dim, torch.is_grad_enabled(), same_bits, listed)
    by = chosen("packed attention" if packed else "attention", facts)
    return None if by in ("masked", "sdpa") else by


def faster_attention(capability: tuple[int, int], flash4_here: bool, cudnn_here: bool) -> str | None:
    """What to install for faster attention on a card; None: nothing."""
    if capability[0] == 9 and not flash4_here:
        return f"attention is 1.1 to 1.5 times as fast on this card with: {install_command('flash4')}"
    if capability[0] > 9 and not cudnn_here:
        return f"packed documents may be faster on this card with: {install_command('cudnn')}"
    return None


def packed_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packs: Packs, backend: str) -> torch.Tensor:
    """q [B, L, Nq, D]; k, v [B, L, Nkv, D], longer where keys are listed -> [B, L, Nq * D]. backend: flash4 | cudnn |
    flash."""
    flat = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))
    out, _ = torch.ops.erniekit.packed_attention(*flat, backend, *packs)
    result: torch.Tensor = out.view(*q.shape[:2], -1)
    return result


# Defined by hand: what `custom_op` wraps around a function costs the host as much as the launch itself.
_LIBRARY = torch.library.Library("erniekit", "FRAGMENT")
_PACKS = "str backend, Tensor bounds, Tensor sizes, Tensor? key_index, Tensor? key_bounds, Tensor? key_places"
_LIBRARY.define(f"packed_attention(Tensor q, Tensor k, Tensor v, {_PACKS}) -> (Tensor, Tensor)")
_LIBRARY.define(
    "packed_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor stats, "
    f"{_PACKS}) -> (Tensor, Tensor, Tensor)"
)


def _listed(k: torch.Tensor, key_index: torch.Tensor | None) -> torch.Tensor:
    """Keys of every token or, where documents share some, of the list they look at."""
    return k if key_index is None else k.index_select(0, key_index)


def _plan(
    backend: str,
    q: torch.Tensor,
    k: torch.Tensor,
    sizes: torch.Tensor,
    bounds: torch.Tensor,
    key_bounds: torch.Tensor | None,
) -> cudnn_packed.PackShape | None:
    """What cuDNN is to do; None: FlashAttention does it."""
    if backend != "cudnn":
        return None
    documents, most, most_keys = sizes.tolist()
    shape = cudnn_packed.PackShape(
        documents=cudnn_packed.bucket(documents, 8, bounds.numel() - 1),
        longest=cudnn_packed.bucket(most, 512, q.shape[0]),
        longest_keys=cudnn_packed.bucket(most_keys, 512, k.shape[0]),
        tokens=q.shape[0],
        keys=k.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        q_width=q.stride(0),
        kv_width=k.stride(0),
        dtype=q.dtype,
        lower_right=key_bounds is not None,
    )
    return shape if cudnn_packed.supported(shape, q.device) else None


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    backend: str,
    bounds: torch.Tensor,
    sizes: torch.Tensor,
    key_index: torch.Tensor | None,
    key_bounds: torch.Tensor | None,
    key_places: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, Nq * D], what backward needs of the softmax [T * Nq])."""
    T, heads, D = q.shape
    k, v = _listed(k, key_index), _listed(v, key_index)
    shape = _plan(backend, q, k, sizes, bounds, key_bounds)
    if shape is not None:
        where = cudnn_packed.offsets(bounds, key_bounds, shape)
        out = q.new_empty(T, heads * D)
        stats = q.new_empty(T * heads, dtype=torch.float32)
        cudnn_packed.forward(q, k, v, out, stats, where, shape)
        return out, stats
    ends = bounds if key_bounds is None else key_bounds
    _, most, most_keys = sizes.tolist()
    if _by_flash4(backend, q):
        out, stats = flash4.forward(q, k, v, bounds, ends, most, most_keys)
        return out.view(T, heads * D), stats.view(-1)
    out, stats, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, bounds, ends, most, most_keys, 0.0, True, False, scale=D**-0.5
    )
    return out.reshape(T, heads * D), stats.reshape(-1)


def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    backend: str,
    bounds: torch.Tensor,
    sizes: torch.Tensor,
    key_index: torch.Tensor | None,
    key_bounds: torch.Tensor | None,
    key_places: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v; a key that several documents saw gets their sum in fp32."""
    T, heads, D = q.shape
    k, v = _listed(k, key_index), _listed(v, key_index)
    grad = grad.contiguous()
    shape = _plan(backend, q, k, sizes, bounds, key_bounds)
    ends = bounds if key_bounds is None else key_bounds
    _, most, most_keys = sizes.tolist()
    if shape is not None:
        where = cudnn_packed.offsets(bounds, key_bounds, shape)
        grads = tuple(torch.empty_like(t) for t in (q, k, v))
        cudnn_packed.backward((q, k, v), out, stats, grad, grads, where, shape)
    elif _by_flash4(backend, q):
        softmax = stats.view(heads, T)
        grad, out = (t.view(T, heads, D) for t in (grad, out))
        grads = flash4.backward(q, grad, k, v, out, softmax, bounds, ends, most, most_keys)
    else:
        none = torch.empty(0, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            grad.view(T, heads, D), q, k, v, out.view(T, heads, D), stats.view(heads, T), bounds, ends, most,
            most_keys, 0.0, True, none, none, scale=D**-0.5,
        )  # fmt: skip
    if key_places is None:
        return grads[0], grads[1], grads[2]
    from erniekit.kernels.triton.shared_keys import sum_places

    grad_k, grad_v = (sum_places(t, key_places) for t in grads[1:])
    return grads[0], grad_k, grad_v


def _by_flash4(backend: str, q: torch.Tensor) -> bool:
    return backend == "flash4" and q.dtype == torch.bfloat16


_LIBRARY.impl("packed_attention", _forward, "CUDA")
_LIBRARY.impl("packed_attention_backward", _backward, "CUDA")


@shapes_of("erniekit::packed_attention")
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *packs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    T, heads, D = q.shape
    return q.new_empty(T, heads * D), q.new_empty(T * heads, dtype=torch.float32)


@shapes_of("erniekit::packed_attention_backward")
def _(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *qkv, ctx.backend, bounds, sizes, key_index, key_bounds, key_places = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*qkv, *output, bounds, sizes, key_index, key_bounds, key_places)


def _gradient(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    grads: tuple[Any, ...] = (None, None, None)
    if grad is not None:
        *saved, bounds, sizes, key_index, key_bounds, key_places = ctx.saved_tensors
        grads = torch.ops.erniekit.packed_attention_backward(
            grad, *saved, ctx.backend, bounds, sizes, key_index, key_bounds, key_places
        )
    return *grads, None, None, None, None, None, None


torch.library.register_autograd("erniekit::packed_attention", _gradient, setup_context=_keep)
