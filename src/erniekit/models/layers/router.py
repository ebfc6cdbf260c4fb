"""The router: which experts a token goes to and with what weight, in fp32 or better whatever the model computes in.

Held by models/layers/moe.py. T tokens, E experts, K choices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from erniekit.kernels import few_tokens
from erniekit.kernels.precision import at_least_fp32
from erniekit.kernels.router_logits import router_logits
from erniekit.models.config import DecoderConfig


class Routing(NamedTuple):
    logits: torch.Tensor  # fp32 [T, E]
    probs: torch.Tensor  # fp32 [T, E]
    ids: torch.Tensor  # int64 [T, K]; E where a choice was dropped over capacity
    weights: torch.Tensor  # [T, K] in the tokens' dtype, summing to one
    own: torch.Tensor | None = None  # as long as there are tokens with an expert, where the host has it; None: all may


class Router(nn.Module):
    """bias: added to the probabilities for choosing only, never for weighting; moved by the balance update, not by
    gradients. None in a model without it, and where the layer keeps it and hands it in."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.experts, self.choices, self.norm_min = config.moe.experts, config.moe.choices, config.moe.norm_min
        self.capacity, self.fewest, self.most = config.moe.capacity, config.moe.fewest, config.moe.most
        self.biased = config.moe.biased
        self.weight = nn.Parameter(torch.zeros(self.experts, config.hidden_size))
        self.bias: nn.Parameter | None = None
        if config.moe.bias:
            self.bias = nn.Parameter(torch.zeros(self.experts), requires_grad=False)

    def forward(self, x_TH: torch.Tensor, bias: torch.Tensor | None = None) -> Routing:
        if few_tokens.routes(x_TH, self.weight, self.choices):
            return self.choose(x_TH, few_tokens.logits(x_TH, self.weight), bias)
        with torch.autocast(x_TH.device.type, enabled=False):
            logits = router_logits(x_TH, self.weight)
        return self.choose(x_TH, logits, bias)

    def choose(self, x_TH: torch.Tensor, logits: torch.Tensor, bias: torch.Tensor | None = None) -> Routing:
        """By fp32 logits [T, E]."""
        bias = self.bias if bias is None else bias
        room = self.room(x_TH.shape[0])
        if room >= x_TH.shape[0] and few_tokens.routes(x_TH, self.weight, self.choices):
            by = bias if self.biased else None
            return Routing(logits, *few_tokens.choose(logits, by, self.choices, self.norm_min, x_TH.dtype))
        with torch.autocast(x_TH.device.type, enabled=False):
            probs = logits.softmax(-1)
            scores = probs.detach()
            if bias is not None and self.biased:
                scores = scores + at_least_fp32(bias)
            ids = scores.topk(self.choices, dim=-1).indices
            weights = probs.gather(1, ids)
            if room < x_TH.shape[0]:
                kept = _first_come(ids, self.experts, room)
                ids, weights = torch.where(kept, ids, self.experts), weights * kept
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=self.norm_min)
        return Routing(logits, probs, ids, weights.to(x_TH.dtype))

    def room(self, tokens: int) -> int:
        """Tokens an expert takes. Paddle's rule: factors for training, evaluation and fewer tokens than experts."""
        room = tokens
        if self.capacity is not None:
            train, evaluation, few = self.capacity
            factor = few if tokens < self.experts else train if self.training else evaluation
            room = max(1, self.fewest, int(factor * tokens / self.experts))
        return room if self.most is None else min(room, self.most)


def _first_come(ids: torch.Tensor, experts: int, room: int) -> torch.Tensor:
    """bool [T, K]: whether a choice is among the first `room` of its expert, tokens in order."""
    chosen = F.one_hot(ids, experts).sum(1)  # a token chooses an expert once at most
    before = chosen.cumsum(0) - chosen
    return before.gather(1, ids) < room
