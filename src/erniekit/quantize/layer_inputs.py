"""What the linears of one decoder layer are multiplied with on the calibration rows: Hessians, maxima, experts' tokens.

Called by streams.py while it runs a layer. T tokens, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from erniekit.models.layers.linear import Linear
from erniekit.models.layers.moe import MoE
from erniekit.models.layers.router import Router, Routing


class InputStats:
    """Of one linear: X^T X over all tokens (where wanted) and the largest magnitude."""

    def __init__(self, width: int, hessian: bool, device: torch.device) -> None:
        self.hessian = torch.zeros(width, width, device=device) if hessian else None
        self.most = torch.zeros((), device=device)

    def add(self, x: torch.Tensor) -> None:
        rows = x.detach().flatten(0, -2).float()
        if rows.numel():
            self.most = torch.maximum(self.most, rows.abs().amax())
        if self.hessian is not None:
            self.hessian.addmm_(rows.T, rows)


class ExpertTokens(NamedTuple):
    """Which tokens calibrate an expert."""

    rows: torch.Tensor  # int64, places in [T, H]
    routed: int  # those the router sent there itself


class LayerInputs:
    def __init__(self, layer: nn.Module, hessians: bool, device: torch.device) -> None:
        self.linears = {
            name: InputStats(module.in_features, hessians, device)
            for name, module in layer.named_modules()
            if isinstance(module, Linear)
        }
        self._tokens: list[torch.Tensor] = []  # [T, H] of each row that was run, in host memory
        self._ids: list[torch.Tensor] = []
        self._probs: list[torch.Tensor] = []

    @cached_property
    def tokens(self) -> torch.Tensor:
        """All of the expert block's inputs, [T, H]; call it when all rows have been run."""
        return torch.cat(self._tokens)

    @cached_property
    def _routing(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat(self._ids), torch.cat(self._probs)

    def of_expert(self, expert: int, at_least: int) -> ExpertTokens:
        """The tokens routed to it; too few are topped up with those the router held most likely for it."""
        ids, probs = self._routing
        routed, probs = (ids == expert).any(1), probs[:, expert]
        count = int(routed.sum())
        if count < at_least:
            others = probs.masked_fill(routed, -1.0).topk(min(at_least - count, len(probs) - count)).indices
            routed = routed.index_fill(0, others, True)
        return ExpertTokens(routed.nonzero().flatten(), count)

    @contextmanager
    def watching(self, layer: nn.Module) -> Iterator[None]:
        handles = []
        for name, stats in self.linears.items():
            handles.append(layer.get_submodule(name).register_forward_pre_hook(_adding(stats)))
        for module in layer.modules():
            if isinstance(module, MoE):
                handles.append(module.router.register_forward_hook(self._note))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, _: Router, args: tuple[torch.Tensor], routing: Routing) -> None:
        self._tokens.append(args[0].detach().cpu())
        self._ids.append(routing.ids.cpu())
        self._probs.append(routing.probs.cpu())


def _adding(stats: InputStats) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        stats.add(args[0])

    return hook
