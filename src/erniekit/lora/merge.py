"""Folding adapters into weights: base + scale * B @ A in fp32, with DoRA at its rows' trained lengths, rounded to the
weight's dtype once.

Called by export/run.py, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from erniekit.lora.adapter import Adapter, LowRank, places, refuse_dora_among
from erniekit.lora.dora import SHORTEST


class WeightUpdate(NamedTuple):
    """A low-rank update of rows [start, stop) of one of our (fused) weights."""

    start: int
    stop: int
    low_rank: LowRank


def row_updates(model: nn.Module, *adapters: Adapter) -> dict[str, list[WeightUpdate]]:
    """Our weight names -> what the adapters add to them. `model` may be on the meta device: only names are read."""
    refuse_dora_among(adapters)
    out: dict[str, list[WeightUpdate]] = {}
    for adapter in adapters:
        for place, update in places(model, adapter).items():
            out.setdefault(place.weight, []).append(WeightUpdate(place.start, place.stop, update))
    return out


def merged_in_fp32(weight: torch.Tensor, updates: Sequence[WeightUpdate]) -> torch.Tensor:
    out = weight.to(torch.float32, copy=True)
    for start, stop, update in updates:
        rows = out[start:stop].addmm_(update.B.to(out), update.A.to(out), alpha=update.scale)
        if update.magnitude is not None:
            lengths = torch.linalg.vector_norm(rows, dim=1).clamp(min=SHORTEST)
            for kept in (weight.dtype, update.magnitude.dtype):  # as training rounds both (dora.py)
                lengths = lengths.to(kept).float()
            rows.mul_((update.magnitude.to(out) / lengths)[:, None])
    return out
