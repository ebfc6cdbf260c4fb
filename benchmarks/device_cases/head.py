"""Inputs of the LM head and its loss on a card."""

from __future__ import annotations

import torch

Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def case(tokens: int, vocab: int, width: int, ignored: float = 0.0, head: bool = True, seed: int = 0) -> Case:
    """Hidden states, weight, labels with a trained model's spread: the label's logit is about 15, among the highest."""
    torch.manual_seed(seed)
    weight = torch.randn(vocab, width, device="cuda").mul_(2 / width**0.5).bfloat16()
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    hidden = (torch.randn(tokens, width, device="cuda") + weight[labels].float() * 3.75).bfloat16()
    labels[torch.rand(tokens, device="cuda") < ignored] = -100
    return hidden.requires_grad_(), weight.requires_grad_(head), labels
