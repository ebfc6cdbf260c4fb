"""`decoding: exact`: the log-probabilities of an answer by the forward pass that training makes, bit for bit.

Used by embedded.py. A step over a cache computes the same numbers in products of other shapes, and so with other last
bits; a policy gradient divides the trainer's probability by the sampler's, and wants 1 before the first update. When an
answer has ended, its tokens go through the model once more as a training row of one sample has them (the prompt and the
answer, the prompt's labels ignored), and its tokens are delivered with those log-probabilities. Alternatives to a token
(top_logprobs) keep the values they had when it was sampled, and so do answers to prompts with pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from erniekit.log import warn
from erniekit.models.layers.attention import InnerAttention
from erniekit.serve.engines.base import Done, Event, Token
from erniekit.serve.engines.delivery import SequenceEvent
from erniekit.serve.engines.sequence import RunningSequence

IGNORED = -100


def hold_back(
    model: Any, run: RunningSequence, events: list[SequenceEvent], sampled: Sequence[Token | None]
) -> list[SequenceEvent]:
    """events: of the tokens that were sampled. None until the answer has ended; then all of it."""
    try:
        done, stop = _taken(run, [event for _, event in events], sampled)
        if done is None:
            return []
        if done.reason == "error" or not run.held:
            return [(run, done)]
        row = [*run.job.prompt, *(token.id for token in run.held), *([] if stop is None else [stop.id])]
        exact = training_logprobs(model, row, len(run.job.prompt)).tolist()
    except Exception as error:  # of one request, such as too little memory for a long answer
        warn(f"log-probabilities failed in the engine: {type(error).__name__}: {error}"[:400])
        return [(run, Done("error", "the engine failed on the log-probabilities of this request"))]
    return [*((run, _with(token, value)) for token, value in zip(run.held, exact)), (run, done)]


def _taken(
    run: RunningSequence, events: Sequence[Event], sampled: Sequence[Token | None]
) -> tuple[Done | None, Token | None]:
    """Holds the tokens back, up to the one that ends the text; the end if it has come, and the token that was it, which
    a row of training has as its last label."""
    done = next((event for event in events if isinstance(event, Done)), None)
    for event in events:
        if isinstance(event, Token):
            run.held.append(event)
            if run.ends_text is not None and run.ends_text(event.id):
                return Done("stop"), None
    return done, sampled[len(events) - 1] if done is not None and done.reason == "stop" else None


def _with(token: Token, logprob: float) -> Token:
    return replace(token, logprob=logprob, top=tuple((id, logprob if id == token.id else p) for id, p in token.top))


def training_logprobs(model: Any, row: Sequence[int], prompt: int) -> torch.Tensor:
    """fp32 [tokens behind the prompt]: by `Decoder.forward` with labels, as a training step calls it."""
    device = next(model.parameters()).device
    ids = torch.tensor([list(row)], device=device)
    labels = ids[:, 1:].clone()
    labels[:, : prompt - 1] = IGNORED
    with _own_attention(model):
        losses: torch.Tensor = model(ids[:, :-1], labels=labels, per_token=True)
    return -losses[0, prompt - 1 :]


@contextmanager
def _own_attention(model: Any) -> Any:
    """Without the cache, for as long as the block lasts."""
    layers = [layer.attn for layer in model.layers]
    paged = [attention.inner for attention in layers]
    try:
        for attention in layers:
            attention.inner = InnerAttention()
        yield
    finally:
        for attention, inner in zip(layers, paged):
            attention.inner = inner
