"""A head in the place of another, for losses of its own. Base of own.py's and distillation.py's heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class WrappedHead(nn.Module):
    """Logits and token losses are the inner head's; a subclass has its own `loss`."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = self.inner.logits(hidden, weight, bias)
        return out

    def token_losses(self, *args: Any) -> torch.Tensor:
        out: torch.Tensor = self.inner.token_losses(*args)
        return out
