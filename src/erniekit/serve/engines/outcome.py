"""What a step's tokens mean for a sequence: the events its client gets, up to its end. Used by embedded.py."""

from __future__ import annotations

from collections.abc import Sequence

from erniekit.serve.engines.base import Done, Pooled, Token
from erniekit.serve.engines.delivery import SequenceEvent
from erniekit.serve.engines.sequence import RunningSequence


def take_tokens(run: RunningSequence, tokens: Sequence[Token | None], longest: int) -> list[SequenceEvent]:
    """Its next tokens, up to the one that ends it."""
    events: list[SequenceEvent] = []
    params = run.job.sampling
    for token in tokens:
        if token is None:
            problem = run.matcher.problem if run.matcher is not None else ""
            return [*events, (run, Done("error", problem or "the model gave no usable number for the next token"))]
        if token.id in run.job.stop_ids and not params.ignore_stop:
            return [*events, (run, Done("stop"))]
        run.ids.append(token.id)
        events.append((run, token))
        if len(run.ids) - len(run.job.prompt) >= params.max_tokens or len(run.ids) >= longest:
            return [*events, (run, Done("length"))]
    return events


def take_states(run: RunningSequence) -> list[SequenceEvent]:
    """The end of a prompt whose states were pooled."""
    assert run.pooled is not None
    return [(run, Pooled(run.pooled.vector())), (run, Done("stop"))]
