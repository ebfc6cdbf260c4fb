"""A preference loss that an installed package brings: what it is given, and what it may answer. Called by dpo.py.

loss_table.py finds it by the word of `loss_type`. n pairs of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from erniekit.errors import ConfigError
from erniekit.loss_table import PAIR_LOSSES, pair_arguments


def package_losses(name: str, values: Mapping[str, Any]) -> torch.Tensor:
    """fp32 [n]. values: by PAIR_ARGUMENTS; log-probabilities are sums over an answer's tokens, with even lengths unless
    normalize_logps is off."""
    function = PAIR_LOSSES.get(name)
    count = values["chosen_logps"].shape[0]
    out = function(**{word: values[word] for word in pair_arguments(function)})
    if not isinstance(out, torch.Tensor):
        raise _refused(name, f"gave {type(out).__name__}, not a tensor")
    if out.shape != (count,):
        raise _refused(name, f"gave the shape {list(out.shape)} for {count} pairs")
    if torch.is_grad_enabled() and values["chosen_logps"].requires_grad and not out.requires_grad:
        raise _refused(name, "gave losses that do not depend on chosen_logps or rejected_logps")
    return out.float()


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"the preference loss {name} of {PAIR_LOSSES.distribution(name)} {why}",
        where="loss_type",
        fix="return one loss for each pair, a tensor [n]",
    )
