"""What a step's tokens mean for a sequence: the events its client gets, up to its end. Used by embedded.py."""

from __future__ import annotations

import math
from collections.abc import Sequence

from erniekit.serve.engines.base import Done, Pooled, Token
from erniekit.serve.engines.delivery import SequenceEvent
from erniekit.serve.engines.paged import SequencePiece
from erniekit.serve.engines.sequence import RunningSequence
from erniekit.serve.request_error import NO_NUMBER


def take_tokens(run: RunningSequence, tokens: Sequence[Token | None], longest: int) -> list[SequenceEvent]:
    """Its next tokens, up to the one that ends it."""
    events: list[SequenceEvent] = []
    params = run.job.sampling
    if numbers := sum(token is not None for token in tokens):
        run.proven = len(run.ids) + numbers - 1
    for token in tokens:
        if token is None:
            problem = run.matcher.problem if run.matcher is not None else ""
            return [*events, (run, Done("error", problem or f"{NO_NUMBER} for the next token"))]
        if token.id in run.job.stop_ids and not params.ignore_stop:
            return [*events, (run, Done("stop"))]
        run.ids.append(token.id)
        events.append((run, token))
        if len(run.ids) - len(run.job.prompt) >= params.max_tokens or len(run.ids) >= longest:
            return [*events, (run, Done("length"))]
    return events


def begins_again(run: RunningSequence, piece: SequencePiece, tokens: Sequence[Token | None]) -> bool:
    """Where a proposal may have spoiled the places before it by its NaN: they are computed once more, without it."""
    if piece.stop <= len(run.ids) or None not in tokens or run.matcher is not None:
        return False
    run.cached = len(run.ids) - 1
    return True


def take_states(run: RunningSequence) -> list[SequenceEvent]:
    """The end of a prompt whose states were pooled."""
    assert run.pooled is not None
    vector = run.pooled.vector()
    if all(map(math.isfinite, vector)):
        run.proven = run.cached
    return [(run, Pooled(vector)), (run, Done("stop"))]
