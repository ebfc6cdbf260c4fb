"""Inputs of products with an fp8 base on a card, at the 21B-A3B shapes."""

from __future__ import annotations

import torch

from erniekit.kernels.expert_mlp import Update
from erniekit.kernels.expert_mlp import expert_mlp as op
from erniekit.kernels.moe_permute import Order, by_expert
from erniekit.kernels.stored import Stored, kind_named

E, K, H, W, RANK = 64, 6, 2560, 1536, 32


def normal(*shape: int, std: float = 1.0, grad: bool = False) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * std).bfloat16().requires_grad_(grad)


def packed(weight: torch.Tensor) -> Stored:
    if weight.dim() == 2:
        return kind_named("fp8").pack(weight)
    return kind_named("fp8").pack(weight.flatten(0, 1)).of_experts(weight.shape[0])


def expert_mlp(x, order, weights, gate_up, down, *updates):  # type: ignore[no-untyped-def]
    base = (w if isinstance(w, Stored) else Stored(w) for w in (gate_up, down))
    return op(x, order, weights, *base, *updates)


def routed(tokens: int, experts: int = E) -> tuple[Order, torch.Tensor]:
    weights, ids = torch.rand(tokens, experts, device="cuda").softmax(-1).topk(K)
    return by_expert(ids, experts), (weights * K).bfloat16()


def block(tokens: int = 2048) -> tuple:
    torch.manual_seed(0)
    order, weights = routed(tokens)
    x, gate_up, down = normal(tokens, H, grad=True), normal(E, 2 * W, H, std=0.02), normal(E, H, W, std=0.02)
    shapes = ((H, W), (H, W), (W, H))
    updates = [Update(normal(E, RANK, i, std=0.02, grad=True), normal(E, o, RANK, std=0.02, grad=True), 2.0)
               for i, o in shapes]  # fmt: skip
    return x, order, weights.requires_grad_(), gate_up, down, updates
