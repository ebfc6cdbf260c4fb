"""Inputs of the attention kernels on a card: rotated projections, packs, and pairs that share a prompt."""

from __future__ import annotations

import torch

from erniekit.data.types import SharedKeys
from erniekit.kernels import cudnn_packed, flash4
from erniekit.kernels.attention import attention
from erniekit.kernels.packed_attention import packed_attention
from erniekit.kernels.rope import cos_sin, inverse_frequencies
from erniekit.kernels.rope_qkv import turned

D = 128


def inputs(B: int, L: int, heads: int, kv_heads: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    qkv = torch.randn(B, L, (heads + 2 * kv_heads) * D, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(B, L, heads * D, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(L, device="cuda").expand(B, L)
    cos, sin = cos_sin(positions, inverse_frequencies(D, 500000.0, None, qkv.device))
    return qkv, grad, cos, sin


def bounds_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)


def shared_prompt(pairs: list[tuple[int, int, int]]) -> tuple[torch.Tensor, int, SharedKeys, int]:
    """Bounds, longest, keys and tokens of (prompt, chosen, rejected) triples."""
    queries, index, keys, start = [], [], [], 0
    for prompt, chosen, rejected in pairs:
        queries += [prompt + chosen, rejected]
        first = torch.arange(start, start + prompt + chosen)
        second = torch.cat([first[:prompt], torch.arange(rejected) + start + prompt + chosen])
        index += [first, second]
        keys += [len(first), len(second)]
        start += prompt + chosen + rejected
    shared = SharedKeys(torch.cat(index).cuda(), bounds_of(keys), max(keys))
    return bounds_of(queries), max(queries), shared, start


def attend(x, cos, sin, heads, kv_heads, halves, packs, kernel):
    q, k, v = turned(x, cos, sin, heads, kv_heads, halves)
    if packs is None:
        return (flash4.row_attention if kernel == "flash4" else attention)(q, k, v).flatten(2)
    return packed_attention(q, k, v, packs, kernel)


def kernels(packed: bool) -> list[str]:
    found = ["flash"] + (["cudnn"] if cudnn_packed.library() is not None else []) if packed else ["rows"]
    return found + (["flash4"] if flash4.library() is not None else [])
