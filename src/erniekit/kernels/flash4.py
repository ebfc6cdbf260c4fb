"""FlashAttention-4 on Hopper cards, through the optional package flash-attn-4. For packed_attention.py.

Rows of one document and packs of many; kernels are made at first use (about 5 s), for any length and number of
documents. B batch, L length, T tokens, N heads, D head_dim.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from erniekit.kernels import broken
from erniekit.kernels.available import loaded, shapes_of

PACKAGE = "flash-attn-4"
HEAD_DIMS = (64, 128)
LEAST = 256  # the least "longest" passed to it: for shorter ones it would make other kernels


@functools.cache
def library() -> Any:
    """The package's module, or None where it is not installed or does not load."""
    return loaded("flash_attn.cute.interface", "_flash_attn_fwd", "_flash_attn_bwd", package=PACKAGE)


@functools.cache
def why_not(group: int, head_dim: int, packed: bool, grad: bool, device: torch.device) -> str | None:
    """Why it cannot compute bf16 heads of this kind, `group` of them to a kv head; None: it can, which was tried once,
    and made the kernels. grad: the gradients too."""
    if head_dim not in HEAD_DIMS:
        return f"heads of {head_dim} are not among {', '.join(map(str, HEAD_DIMS))}"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "for Hopper cards"
    if library() is None:
        return "flash-attn-4 is not installed"
    made = {"device": device, "dtype": torch.bfloat16}
    q, k = torch.ones(1, LEAST, group, head_dim, **made), torch.ones(1, LEAST, 1, head_dim, **made)  # type: ignore[call-overload]
    bounds = torch.tensor([0, LEAST], dtype=torch.int32).to(device, non_blocking=True) if packed else None
    if packed:
        q, k = q[0], k[0]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of how its compiler reads its own arguments
            out, stats = forward(q, k, k, bounds, bounds, LEAST, LEAST)
            if grad:
                backward(q, out, k, k, out, stats, bounds, bounds, LEAST, LEAST)
    except Exception as problem:
        broken.report(PACKAGE, problem)
        return f"does not work here ({type(problem).__name__})"
    return None


def _documents(
    bounds: torch.Tensor | None, key_bounds: torch.Tensor | None, longest: int, longest_keys: int
) -> dict[str, Any]:
    if bounds is None:
        return {}
    return {
        "cu_seqlens_q": bounds,
        "cu_seqlens_k": key_bounds,
        "max_seqlen_q": max(longest, LEAST),
        "max_seqlen_k": max(longest_keys, LEAST),
    }


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor | None = None,
    key_bounds: torch.Tensor | None = None,
    longest: int = 0,
    longest_keys: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, N, D], k, v [keys, Nkv, D] and int32 bounds of documents, whose ends are aligned; without bounds
    [B, L, N, D]. -> out as q, and what backward needs of the softmax (fp32 [N, T] or [B, N, L])."""
    where = _documents(bounds, key_bounds, longest, longest_keys)
    out, stats, *_ = library()._flash_attn_fwd(q, k, v, causal=True, return_lse=True, **where)
    return out, stats


def backward(
    q: torch.Tensor,
    grad: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    bounds: torch.Tensor | None = None,
    key_bounds: torch.Tensor | None = None,
    longest: int = 0,
    longest_keys: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of q, k, v; keys past the last document's are not written."""
    where = _documents(bounds, key_bounds, longest, longest_keys)
    found = library()._flash_attn_bwd(q, k, v, out, grad, stats, causal=True, **where)
    return found[0], found[1], found[2]


# Rows of one document each, as an op of its own that compiled layers may hold.
_LIBRARY = torch.library.Library("erniekit", "FRAGMENT")
_LIBRARY.define("flash4_rows(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")
_LIBRARY.define(
    "flash4_rows_backward(Tensor q, Tensor grad, Tensor k, Tensor v, Tensor out, Tensor stats) "
    "-> (Tensor, Tensor, Tensor)"
)


def row_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [B, L, N, D]; k, v [B, L, Nkv, D], bf16 -> [B, L, N, D]."""
    out: tuple[torch.Tensor, torch.Tensor] = torch.ops.erniekit.flash4_rows(q, k, v)
    return out[0]


_LIBRARY.impl("flash4_rows", lambda q, k, v: forward(q, k, v), "CUDA")
_LIBRARY.impl("flash4_rows_backward", lambda *tensors: backward(*tensors), "CUDA")


@shapes_of("erniekit::flash4_rows")
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    B, L, N, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(B, N, L, dtype=torch.float32)


@shapes_of("erniekit::flash4_rows_backward")
def _(q: torch.Tensor, grad: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output)


def _gradient(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return None, None, None
    q, k, v, out, stats = ctx.saved_tensors
    grads: tuple[Any, ...] = torch.ops.erniekit.flash4_rows_backward(q, grad.contiguous(), k, v, out, stats)
    return grads


torch.library.register_autograd("erniekit::flash4_rows", _gradient, setup_context=_keep)
