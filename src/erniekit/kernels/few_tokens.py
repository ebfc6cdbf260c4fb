"""A router and its experts over the few tokens of a server's step, without gradients: a handful of launches where
training has forty, and products that read each weight once. Called by models/layers/router.py, moe_permute.py and
expert_mlp.py, which define what is computed, inside `enabled` (serve/engines/recorded.py): a training run's evaluation
and a server's exact log-probabilities have training's own kernels whatever their length.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from erniekit.kernels.available import runs_triton
from erniekit.kernels.selection import ExpertFacts, chosen
from erniekit.kernels.stored import PLAIN, Stored

ROWS = 1536  # most, of tokens times choices: with more the tiles of large products are filled
SORTED = 512  # most that one program sorts sooner than torch does
TILE, FILLED = 16, 8  # rows of a tile; where experts have more than so many on average, a tile has twice as many
EXPERTS = 1024  # most that one program sorts or chooses from


class _Thread(threading.local):
    on = False


_thread = _Thread()


@contextmanager
def enabled() -> Iterator[None]:
    """In this thread. Nothing inside may need gradients."""
    before, _thread.on = _thread.on, True
    try:
        yield
    finally:
        _thread.on = before


def _on(tensor: torch.Tensor) -> bool:
    return not torch.compiler.is_compiling() and _thread.on and runs_triton(tensor)


def routes(x: torch.Tensor, weight: torch.Tensor, choices: int) -> bool:
    """Whether logits and choices of these tokens are computed here."""
    if not _on(x):
        return False
    few = 0 < x.shape[0] * choices <= ROWS and weight.shape[0] <= EXPERTS
    return few and x.dtype != torch.float64 and weight.dtype == torch.float32 and weight.is_contiguous()


def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H], weight [E, H] -> fp32 [T, E]."""
    from erniekit.kernels.triton import few_tokens

    return few_tokens.logits(x.contiguous(), weight)


def choose(
    logits: torch.Tensor, bias: torch.Tensor | None, choices: int, least: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probabilities [T, E], experts and weights [T, K]."""
    from erniekit.kernels.triton import few_tokens

    bias = None if bias is None else bias.float().contiguous()
    return few_tokens.choose(logits.contiguous(), bias, choices, least, dtype)


def sorts(ids: torch.Tensor, experts: int) -> bool:
    if not _on(ids):
        return False
    return 0 < ids.numel() <= SORTED and experts < EXPERTS and ids.dtype == torch.int64


def order(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from erniekit.kernels.triton import few_tokens

    return few_tokens.order(ids, experts)


def multiplies(x: torch.Tensor, rows: int, gate_up: Stored, down: Stored) -> bool:
    """Whether the products of so many rows, without updates, are computed here."""
    if not _on(x) or not 0 < rows <= ROWS:
        return False
    if gate_up.kind != PLAIN or down.kind != PLAIN or not gate_up.data.dtype == down.data.dtype == x.dtype:
        return False
    facts = ExpertFacts(x.device, x.dtype, gate_up.data.shape[2], down.data.shape[2])
    return chosen("experts of few tokens", facts) == "triton"


def experts(
    x: torch.Tensor,
    row_of: torch.Tensor,
    place_of: torch.Tensor,
    ends: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """As expert_mlp."""
    from erniekit.kernels.triton import expert_rows, few_tokens

    each = TILE if row_of.shape[0] <= FILLED * gate_up.shape[0] else 2 * TILE
    given = (weights.contiguous(), gate_up.contiguous(), down.contiguous(), each)
    return expert_rows.sum_choices(
        few_tokens.products(x.contiguous(), row_of, ends, *given), place_of, weights.shape[1], ends
    )
