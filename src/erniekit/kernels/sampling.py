"""The next token of every row of a batch, with its own request's parameters, without waiting for the device.

Called by serve/engines. A draw is exact in whole numbers: a token's weight is exp((score - the highest) / temperature)
in units of 2**-40, so that sums do not depend on their order, and a row's token does not depend on the other rows. The
number it is drawn by depends only on the request's seed and the token's place: what is computed again is drawn again.
R rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from erniekit.kernels.available import runs_triton

UNIT = 40  # bits of the largest weight: the sum of 2**22 tokens fits into 62
GOLDEN, FIRST, SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685  # of splitmix64
MASKS = {shift: (1 << 64 - shift) - 1 for shift in (30, 27, 31, 11)}


class DrawParams(NamedTuple):
    """Of each row."""

    temperature: torch.Tensor  # fp32 [R]; 0: the likeliest
    top_p: torch.Tensor  # fp32 [R]
    top_k: torch.Tensor  # int64 [R]; 0: all
    vocab: torch.Tensor  # int64 [R]: columns that spell something
    seed: torch.Tensor  # int64 [R]


def draw(logits: torch.Tensor, params: DrawParams, places: torch.Tensor) -> torch.Tensor:
    """logits [R, V] -> int64 [R]; -1 where they are no numbers. places int64 [R]: of the tokens that are drawn.

    Of the top_k likeliest tokens those that make up top_p of their share, one of them; tokens as likely as the last
    one kept are kept with it.
    """
    if runs_triton(logits):
        from erniekit.kernels.triton import sampling as kernels

        return kernels.draw(logits, params, places)
    return reference(logits, params, places)


def uniform(seeds: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """fp64 [R] in [0, 1)."""
    bits = _shifted(_mixed(_mixed(seeds + GOLDEN) + places * GOLDEN), 11)
    return bits.double() * 2.0**-53


def _mixed(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, shift: int) -> torch.Tensor:
    return (x >> shift) & MASKS[shift]


def reference(logits: torch.Tensor, params: DrawParams, places: torch.Tensor) -> torch.Tensor:
    scores = logits.float()
    inside = torch.arange(scores.shape[1], device=scores.device) < params.vocab[:, None]
    scores = scores.masked_fill(~inside, -torch.inf)
    highest = scores.amax(-1, keepdim=True)
    sound = torch.isfinite(highest[:, 0])
    greedy = params.temperature <= 0
    likeliest = scores.argmax(-1)
    if bool(greedy.all()):  # the usual case on a CPU, where the check is no wait
        return torch.where(sound, likeliest, -1)
    heat = torch.where(greedy, 1.0, params.temperature)[:, None]
    weights = (((scores - highest) / heat).exp() * 2.0**UNIT).nan_to_num(0.0).long()
    weights = _kept(weights, scores, params)
    sums = weights.cumsum(-1)
    target = (uniform(params.seed, places) * sums[:, -1].double()).long()
    target = torch.minimum(target, sums[:, -1] - 1)[:, None]
    drawn = torch.searchsorted(sums, target, right=True)[:, 0]
    return torch.where(sound, torch.where(greedy, likeliest, drawn), -1)


def _kept(weights: torch.Tensor, scores: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Zero for tokens outside of top_k and top_p."""
    size = scores.shape[1]
    if bool(((params.top_k <= 0) & (params.top_p >= 1)).all()):
        return weights
    order = scores.sort(dim=-1, descending=True).values
    most = torch.where(params.top_k <= 0, size, params.top_k).clamp(max=size)
    weights = torch.where(scores >= order.gather(1, most[:, None] - 1), weights, 0)
    heaviest = weights.sort(dim=-1, descending=True).values
    sums = heaviest.cumsum(-1)
    share = (params.top_p.double() * sums[:, -1].double()).ceil().long()
    share = torch.where(params.top_p >= 1, sums[:, -1], share)
    last = torch.searchsorted(sums, share[:, None]).clamp(max=size - 1)  # its token crosses the share and is kept
    least = heaviest.gather(1, last).clamp(min=1)
    return torch.where(weights >= least, weights, 0)
