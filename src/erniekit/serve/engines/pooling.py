"""The pooled states of a prompt, for embeddings: collected piece by piece as plain_step.py computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

Pooling = Literal["mean", "last"]


class PooledStates:
    """One vector of a sequence's last hidden states, as the model's final norm gives them. H hidden."""

    def __init__(self, pooling: Pooling) -> None:
        self.pooling = pooling
        self._sum_H: torch.Tensor | None = None
        self._tokens = 0

    def add(self, states_TH: torch.Tensor, start: int, norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """States before the norm. start: the place of the first; a sequence that was evicted begins again at 0."""
        if self.pooling == "last":
            self._sum_H, self._tokens = norm(states_TH[-1:])[0].double(), 1
            return
        if start == 0:
            self._sum_H, self._tokens = None, 0
        new = norm(states_TH).double().sum(0)
        self._sum_H = new if self._sum_H is None else self._sum_H + new
        self._tokens += states_TH.shape[0]

    def vector(self) -> tuple[float, ...]:
        assert self._sum_H is not None
        return tuple((self._sum_H / self._tokens).tolist())
