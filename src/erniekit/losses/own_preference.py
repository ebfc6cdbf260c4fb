"""A preference loss of the user's own, of an installed package or a Python session: what it is given, what it may
answer. recipes/own_loss.py finds it, dpo.py calls it. n pairs of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from erniekit.errors import ConfigError
from erniekit.loss_table import PAIR_ARGUMENTS, PAIR_LOSSES, REFERENCE_ARGUMENTS, not_a_pair_loss, pair_arguments
from erniekit.losses.finite_watch import FiniteWatch


@dataclass(frozen=True, eq=False)
class PairLoss:
    """A function of PAIR_ARGUMENTS, by these names -> the loss of each pair [n]."""

    function: Callable[..., torch.Tensor]
    name: str
    where: str = "loss"  # who named it
    watch: FiniteWatch = field(default_factory=FiniteWatch, repr=False)

    @classmethod
    def of(cls, function: Any, name: str) -> PairLoss:
        """A Python session's; raises where its signature is not that of a preference loss."""
        why = not_a_pair_loss(name, function) if callable(function) else "cannot be called"
        if why:
            raise ConfigError(
                f"the loss function {name} {why}",
                where="loss",
                fix=f"def loss(chosen_logps, rejected_logps), and of {', '.join(PAIR_ARGUMENTS[2:])} what it needs; "
                "one loss a pair, [n]",
            )
        return cls(function, name)

    @classmethod
    def of_package(cls, loss_type: str) -> PairLoss:
        name = f"{loss_type} of {PAIR_LOSSES.distribution(loss_type)}"
        return cls(PAIR_LOSSES.get(loss_type), name, "loss_type")

    @property
    def needs_reference(self) -> bool:
        return any(word in REFERENCE_ARGUMENTS for word in pair_arguments(self.function))

    def __call__(self, values: Mapping[str, Any]) -> torch.Tensor:
        """fp32 [n]. values: by PAIR_ARGUMENTS; log-probabilities are sums over an answer's tokens, with even lengths
        unless normalize_logps is off."""
        policy = [values[word] for word in PAIR_ARGUMENTS[:2]]
        count = len(policy[0])
        out = self.function(**{word: values[word] for word in pair_arguments(self.function)})
        if not isinstance(out, torch.Tensor):
            raise self._refused(f"gave {type(out).__name__}, not a tensor")
        if out.shape != (count,):
            raise self._refused(f"gave the shape {list(out.shape)} for {count} pairs")
        if torch.is_grad_enabled() and policy[0].requires_grad and not out.requires_grad:
            raise self._refused("gave losses that do not depend on chosen_logps or rejected_logps")
        self.watch.see(policy, out)
        return out.float()

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(
            f"the preference loss {self.name} {why}",
            where=self.where,
            fix="return one loss for each pair, a tensor [n]",
        )
