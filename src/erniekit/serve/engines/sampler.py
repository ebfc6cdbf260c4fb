"""The sampler: the next token of every row of a batch, with its own request's parameters and random generator.

Used by embedded.py.

R rows, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from erniekit.serve.engines.base import GREEDY_TEMPERATURE, SamplingParams, Token

LARGEST = torch.finfo(torch.float32).max
LEAST_LOGPROB = -9999.0  # as OpenAI's; JSON has no minus infinity


@dataclass(frozen=True)
class SamplerRow:
    """What the sampler needs to know of a sequence."""

    prompt: Sequence[int]
    generated: Sequence[int]
    sampling: SamplingParams
    stop_ids: frozenset[int]
    vocab: int
    rng: random.Random


def sample(logits: torch.Tensor, rows: Sequence[SamplerRow]) -> list[Token | None]:
    """logits [R, V] -> a token a row; None where the logits are not finite.

    A seed's tokens are the same in any company: its row draws one number from its own generator.
    """
    scores = logits.float()
    if len({row.vocab for row in rows}) == 1 and all(row.sampling.plain for row in rows):
        scores = scores[:, : rows[0].vocab]  # the usual case needs no copy
    sound = torch.isfinite(scores.amax(-1)).tolist()
    plain = [row.sampling.plain and row.vocab >= scores.shape[1] for row in rows]
    if not all(plain):
        scores = scores.clone()
        for k, row in enumerate(rows):
            if not plain[k]:
                _apply_penalties(scores[k], row)
    picked = scores.argmax(-1)
    drawn = [k for k, row in enumerate(rows) if sound[k] and not row.sampling.greedy]
    if drawn:
        picked[torch.tensor(drawn, device=picked.device)] = _draw(scores[drawn], [rows[k] for k in drawn])
    ids = picked.tolist()
    told = _logprobs(logits, rows, ids, sound)
    return [told.get(k) or Token(ids[k]) if sound[k] else None for k in range(len(rows))]


def _apply_penalties(scores: torch.Tensor, row: SamplerRow) -> None:
    """One row [V], in place, in the order transformers applies them."""
    params, size = row.sampling, scores.shape[0]
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*row.prompt, *row.generated}), device=scores.device)
        old = scores[seen]
        new = torch.where(old < 0, old * params.repetition_penalty, old / params.repetition_penalty)
        scores[seen] = new.clamp(-LARGEST, LARGEST)
    if row.generated and (params.frequency_penalty or params.presence_penalty):
        generated, times = torch.tensor(row.generated, device=scores.device).unique(return_counts=True)
        scores[generated] -= params.frequency_penalty * times + params.presence_penalty
    for id, extra in params.bias:
        scores[id] += extra
    scores[row.vocab :] = -torch.inf
    ends = [id for id in row.stop_ids if id < min(row.vocab, size)]
    if ends and len(row.generated) < params.min_tokens and len(ends) < min(row.vocab, size):
        scores[ends] = -torch.inf


def _draw(scores: torch.Tensor, rows: Sequence[SamplerRow]) -> torch.Tensor:
    """Of the top_k likeliest tokens those that make up top_p of their share, one of them by each row's own number in
    [0, 1). Each row of scores has a finite largest one."""
    device = scores.device
    heat = torch.tensor([row.sampling.temperature for row in rows], device=device)[:, None]
    share = torch.tensor([row.sampling.top_p for row in rows], dtype=torch.float64, device=device)[:, None]
    rng = torch.tensor([row.rng.random() for row in rows], dtype=torch.float64, device=device)[:, None]
    scores = scores - scores.amax(-1, keepdim=True)  # before the division: none is then larger than 0
    chances, order = (
        (scores / heat.clamp(min=GREEDY_TEMPERATURE)).softmax(-1).sort(dim=-1, descending=True, stable=True)
    )
    sums = chances.double().cumsum(-1)
    size = scores.shape[-1]
    most = torch.tensor([row.sampling.top_k or size for row in rows], device=device)[:, None]
    inside = torch.arange(size, device=device) < most
    mass = torch.where(most < size, (chances * inside).double().sum(-1, keepdim=True), 1.0)
    kept = inside & ((sums - chances) < share * mass)  # the token that crosses the share is the last to be kept
    kept[:, 0] = True
    total = (chances * kept).double().sum(-1, keepdim=True)
    place = torch.searchsorted(sums, rng * total, right=True)
    place = torch.minimum(place, kept.sum(-1, keepdim=True) - 1)
    return order.gather(1, place)[:, 0]


def _logprobs(
    logits: torch.Tensor, rows: Sequence[SamplerRow], ids: Sequence[int], sound: Sequence[bool]
) -> dict[int, Token]:
    """Of the rows that ask: the model's own chances, before temperature and penalties."""
    out = {}
    for k, row in enumerate(rows):
        most = row.sampling.logprobs
        if most is None or not sound[k]:
            continue
        chances = logits[k, : row.vocab].float().log_softmax(-1).clamp(min=LEAST_LOGPROB)
        values, likeliest = chances.topk(min(most, len(chances)))
        top = tuple(zip(likeliest.tolist(), values.tolist()))
        out[k] = Token(ids[k], float(chances[ids[k]]), top)
    return out
