"""A loss function of the user's own: what each trained token costs, in the place of its cross-entropy.

recipes/own_loss.py puts `OwnLossHead` into a model's `output` slot, so that it is computed where the head's weights
are, in every layout; it is summed and divided as the built-in loss. n trained tokens, V vocab.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from erniekit.errors import ConfigError
from erniekit.losses.finite_watch import FiniteWatch
from erniekit.losses.wrapped_head import WrappedHead

ARGUMENTS = {
    "logits": "float32 [n, V], the model's scores for the next token",
    "logprobs": "float32 [n], the logarithm of the label's probability",
    "labels": "int64 [n], the next token",
}


@dataclass(frozen=True)
class TokenLoss:
    """A function of `logits` or `logprobs`, and `labels`, by these names -> the loss of each token [n]."""

    function: Callable[..., torch.Tensor]
    name: str
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, function: Any, name: str) -> TokenLoss:
        """Raises where the signature is not that of a token loss."""
        if not callable(function):
            raise _refused(name, f"is {type(function).__name__}, which cannot be called")
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            raise _refused(name, "has no signature that Python can read; wrap it in a def") from None
        named = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        taken = tuple(parameter for parameter in named if parameter in ARGUMENTS)
        unknown = [
            p.name
            for p in parameters
            if p.name not in ARGUMENTS and p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        if unknown:
            raise _refused(name, f"has the parameter {unknown[0]!r}, which is not given to it")
        if ("logits" in taken) == ("logprobs" in taken):
            raise _refused(name, "must take one of logits and logprobs")
        return cls(function, name, taken)

    @property
    def needs_logits(self) -> bool:
        return "logits" in self.arguments

    def __call__(self, **arguments: torch.Tensor) -> torch.Tensor:
        """The loss of each token, fp32 [n]."""
        count = arguments["labels"].shape[0]
        out = self.function(**{argument: arguments[argument] for argument in self.arguments})
        if not isinstance(out, torch.Tensor):
            raise _refused(self.name, f"gave {type(out).__name__}, not a tensor")
        if out.shape != (count,):
            hint = "; reduction='none' gives one each" if out.dim() == 0 else ""
            raise _refused(self.name, f"gave the shape {list(out.shape)} for {count} trained tokens{hint}")
        if torch.is_grad_enabled() and not out.requires_grad:
            raise _refused(self.name, f"gave losses that do not depend on {'/'.join(w for w in self.arguments[:1])}")
        return out.float()


class OwnLossHead(WrappedHead):
    """In the slot `output`, around the head that was there."""

    def __init__(self, inner: Any, loss: TokenLoss) -> None:
        super().__init__(inner)
        self.own = loss
        self.watch = FiniteWatch()

    def loss(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        bias: torch.Tensor | None,
        ignore: int,
        chunk: int,
        count: int | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """As LocalHead.loss: the SUM over the labels that are not ignored, times scale."""
        places = (labels.flatten() != ignore).nonzero().squeeze(1)
        targets = labels.flatten()[places]
        if self.own.needs_logits:
            rows = hidden.flatten(0, 1)[places]
            # Without a trained token there is still a graph: gradients are summed over ranks that may have some.
            total = rows.sum().float() * 0.0
            kept = len(places) <= chunk
            for x, y in zip(rows.split(chunk), targets.split(chunk)):
                if len(y):
                    part = self._of_logits(x, weight, bias, y, kept)
                    self.watch.see([x], part)
                    total = total + part
        else:
            losses = self.inner.token_losses(hidden, weight, labels, bias, ignore, chunk, count)
            total = losses.sum() * 0.0
            if len(places):
                logprobs = -losses.flatten()[places]
                found = self.own(logprobs=logprobs, labels=targets)
                self.watch.see([logprobs], found)
                total = total + found.sum()
        return total if scale is None else total * scale

    def _of_logits(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, kept: bool
    ) -> torch.Tensor:
        """Of one chunk. Unless kept, its logits are computed again in the backward pass: those of all chunks never
        exist at once."""

        def summed(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return self.own(logits=F.linear(rows, weight, bias).float(), labels=targets).sum()

        if kept or not torch.is_grad_enabled():
            return summed(rows, weight, bias)
        from torch.utils.checkpoint import checkpoint

        result: torch.Tensor = checkpoint(summed, rows, weight, bias, use_reentrant=False)
        return result


def _refused(name: str, why: str) -> ConfigError:
    arguments = "; ".join(f"{argument}: {what}" for argument, what in ARGUMENTS.items())
    return ConfigError(
        f"the loss function {name} {why}",
        where="loss",
        fix=f"def loss(logits, labels) or def loss(logprobs, labels), one loss a token, [n]. {arguments}",
    )
