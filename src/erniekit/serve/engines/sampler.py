"""The sampler: the next token of every row of a batch, with its own request's parameters and seed.

Used by speculation.py and recorded.py. kernels/sampling.py draws; here are penalties, bias, grammars and log
probabilities, which depend on the tokens a sequence has generated so far. R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from erniekit.kernels.sampling import DrawParams, draw
from erniekit.serve.engines.base import SamplingParams, Token, TokenMatcher

LARGEST = torch.finfo(torch.float32).max
LEAST_LOGPROB = -9999.0  # as OpenAI's; JSON has no minus infinity


@dataclass(frozen=True)
class SamplerRow:
    """What the sampler reads of a sequence."""

    prompt: Sequence[int]
    generated: Sequence[int]
    sampling: SamplingParams
    stop_ids: frozenset[int]
    vocab: int
    seed: int  # of 64 bits, signed
    matcher: TokenMatcher | None = None  # of its grammar


def sample(logits: torch.Tensor, rows: Sequence[SamplerRow]) -> list[Token | None]:
    """logits [R, V] -> a token a row; None where the logits are not finite, or no token fits a row's grammar.

    A seed's tokens are the same in any batch: a row is drawn by a number from its own seed and its token's place.
    """
    scores = logits
    special = [k for k, row in enumerate(rows) if not row.sampling.plain]
    bound = [k for k, row in enumerate(rows) if row.matcher is not None]
    if special or bound:
        # On a device the logits are still being computed while the host computes masks.
        masks = _allowed_by_grammar([rows[k] for k in bound], logits.shape[1], logits.device)
        scores = logits.float().clone()
        for k in special:
            _apply_penalties(scores[k], rows[k])
        if bound:
            scores[bound] = scores[bound].masked_fill(~masks, -torch.inf)
        for k in special:
            _apply_min_p(scores[k], rows[k])
    places = torch.tensor([len(row.prompt) + len(row.generated) for row in rows], device=logits.device)
    ids = draw(scores, draw_params(rows, logits.device), places).tolist()
    logprobs = _logprobs(logits, rows, ids)
    return [logprobs.get(k) or Token(id) if id >= 0 else None for k, id in enumerate(ids)]


def draw_numbers(params: SamplingParams, vocab: int, seed: int) -> tuple[tuple[float, float], tuple[int, int, int]]:
    """Of a row: temperature and top_p; top_k, vocabulary and seed."""
    return (0.0 if params.greedy else params.temperature, params.top_p), (params.top_k, vocab, seed)


def params_of(floats: torch.Tensor, integers: torch.Tensor) -> DrawParams:
    """fp32 [R, 2] and int64 [R, 3] of draw_numbers."""
    temperature, top_p = floats.unbind(1)
    top_k, vocab, seed = integers.unbind(1)
    return DrawParams(*(t.contiguous() for t in (temperature, top_p, top_k, vocab, seed)))


def draw_params(rows: Sequence[SamplerRow], device: torch.device) -> DrawParams:
    floats, integers = zip(*(draw_numbers(row.sampling, row.vocab, row.seed) for row in rows))
    return params_of(torch.tensor(floats, device=device), torch.tensor(integers, device=device))


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
    if params.allowed:
        kept = torch.tensor(params.allowed, device=scores.device)
        others = torch.ones(size, dtype=torch.bool, device=scores.device).index_fill_(0, kept, False)
        scores.masked_fill_(others, -torch.inf)
    ends = [id for id in row.stop_ids if id < min(row.vocab, size)]
    if ends and len(row.generated) < params.min_tokens and len(ends) < min(row.vocab, size):
        scores[ends] = -torch.inf


def _apply_min_p(scores: torch.Tensor, row: SamplerRow) -> None:
    """One row [V], in place: chances as the temperature makes them, against that of the likeliest."""
    params = row.sampling
    if params.min_p and not params.greedy:
        least = scores[: row.vocab].max() + params.temperature * math.log(params.min_p)
        scores.masked_fill_(scores < least, -torch.inf)


def _allowed_by_grammar(rows: Sequence[SamplerRow], size: int, device: torch.device) -> torch.Tensor:
    """bool [rows, V]; tokens of the model beyond the tokenizer's are not allowed."""
    bitmasks = np.zeros((len(rows), -(-size // 32)), dtype=np.int32)
    for k, row in enumerate(rows):
        assert row.matcher is not None
        mask = row.matcher.allowed(row.generated)[: bitmasks.shape[1]]
        bitmasks[k, : len(mask)] = mask
    sent = torch.from_numpy(bitmasks).to(device)
    bits = torch.arange(32, dtype=torch.int32, device=device)
    return ((sent[:, :, None] >> bits) & 1).bool().flatten(1)[:, :size]


def _logprobs(logits: torch.Tensor, rows: Sequence[SamplerRow], ids: Sequence[int]) -> dict[int, Token]:
    """Of the rows that request them: the model's own probabilities, before temperature and penalties."""
    out = {}
    for k, row in enumerate(rows):
        most = row.sampling.logprobs
        if most is None or ids[k] < 0:
            continue
        chances = logits[k, : row.vocab].float().log_softmax(-1).clamp(min=LEAST_LOGPROB)
        values, likeliest = chances.topk(min(most, len(chances)))
        top = tuple(zip(likeliest.tolist(), values.tolist()))
        out[k] = Token(ids[k], float(chances[ids[k]]), top)
    return out
