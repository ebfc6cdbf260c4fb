"""The next token of every row of a batch, each by its own request's wishes and with its own luck. For embedded.py.

R rows, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from erniekit.serve.engines.base import COLD, Choosing, Token

LARGEST = torch.finfo(torch.float32).max
LEAST_LOGPROB = -9999.0  # as OpenAI's; JSON has no minus infinity


@dataclass(frozen=True)
class Row:
    """What choosing needs to know of a sequence."""

    prompt: Sequence[int]
    said: Sequence[int]
    choosing: Choosing
    stop_ids: frozenset[int]
    vocab: int
    luck: random.Random


def choose(logits: torch.Tensor, rows: Sequence[Row]) -> list[Token | None]:
    """logits [R, V] -> a token a row; None where the model gave no number to choose by.

    A seed's tokens are the same in any company: its row draws one number from its own generator.
    """
    scores = logits.float()
    if len({row.vocab for row in rows}) == 1 and all(row.choosing.plain for row in rows):
        scores = scores[:, : rows[0].vocab]  # the usual case needs no copy
    sound = torch.isfinite(scores.amax(-1)).tolist()
    plain = [row.choosing.plain and row.vocab >= scores.shape[1] for row in rows]
    if not all(plain):
        scores = scores.clone()
        for k, row in enumerate(rows):
            if not plain[k]:
                _adjust(scores[k], row)
    picked = scores.argmax(-1)
    drawn = [k for k, row in enumerate(rows) if sound[k] and not row.choosing.greedy]
    if drawn:
        picked[torch.tensor(drawn, device=picked.device)] = _draw(scores[drawn], [rows[k] for k in drawn])
    ids = picked.tolist()
    told = _logprobs(logits, rows, ids, sound)
    return [told.get(k) or Token(ids[k]) if sound[k] else None for k in range(len(rows))]


def _adjust(scores: torch.Tensor, row: Row) -> None:
    """One row [V], in place, in the order transformers applies them."""
    wish, size = row.choosing, scores.shape[0]
    if wish.repetition_penalty != 1:
        seen = torch.tensor(sorted({*row.prompt, *row.said}), device=scores.device)
        old = scores[seen]
        new = torch.where(old < 0, old * wish.repetition_penalty, old / wish.repetition_penalty)
        scores[seen] = new.clamp(-LARGEST, LARGEST)
    if row.said and (wish.frequency_penalty or wish.presence_penalty):
        said, times = torch.tensor(row.said, device=scores.device).unique(return_counts=True)
        scores[said] -= wish.frequency_penalty * times + wish.presence_penalty
    for id, extra in wish.bias:
        scores[id] += extra
    scores[row.vocab :] = -torch.inf
    ends = [id for id in row.stop_ids if id < min(row.vocab, size)]
    if ends and len(row.said) < wish.min_tokens and len(ends) < min(row.vocab, size):
        scores[ends] = -torch.inf


def _draw(scores: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Of the top_k likeliest tokens those that make up top_p of their share, one of them by each row's own number in
    [0, 1). Each row of scores has a finite largest one."""
    device = scores.device
    heat = torch.tensor([row.choosing.temperature for row in rows], device=device)[:, None]
    share = torch.tensor([row.choosing.top_p for row in rows], dtype=torch.float64, device=device)[:, None]
    luck = torch.tensor([row.luck.random() for row in rows], dtype=torch.float64, device=device)[:, None]
    scores = scores - scores.amax(-1, keepdim=True)  # before the division: none is then larger than 0
    chances, order = (scores / heat.clamp(min=COLD)).softmax(-1).sort(dim=-1, descending=True, stable=True)
    sums = chances.double().cumsum(-1)
    size = scores.shape[-1]
    most = torch.tensor([row.choosing.top_k or size for row in rows], device=device)[:, None]
    inside = torch.arange(size, device=device) < most
    mass = torch.where(most < size, (chances * inside).double().sum(-1, keepdim=True), 1.0)
    kept = inside & ((sums - chances) < share * mass)  # the token that crosses the share is the last to be kept
    kept[:, 0] = True
    total = (chances * kept).double().sum(-1, keepdim=True)
    place = torch.searchsorted(sums, luck * total, right=True)
    place = torch.minimum(place, kept.sum(-1, keepdim=True) - 1)
    return order.gather(1, place)[:, 0]


def _logprobs(logits: torch.Tensor, rows: Sequence[Row], ids: Sequence[int], sound: Sequence[bool]) -> dict[int, Token]:
    """Of the rows that ask: the model's own chances, before temperature and penalties."""
    out = {}
    for k, row in enumerate(rows):
        most = row.choosing.logprobs
        if most is None or not sound[k]:
            continue
        chances = logits[k, : row.vocab].float().log_softmax(-1).clamp(min=LEAST_LOGPROB)
        values, likeliest = chances.topk(min(most, len(chances)))
        top = tuple(zip(likeliest.tolist(), values.tolist()))
        out[k] = Token(ids[k], float(chances[ids[k]]), top)
    return out
