"""A launch of recorded steps whose tokens are not read yet, and tensors on their way to the host.

Used by recorded.py and embedded.py. R rows that draw, B rows of a batch, k tokens of a proposal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from erniekit.devices.base import Event
from erniekit.serve.engines.base import Token
from erniekit.serve.engines.sequence import RunningSequence
from erniekit.serve.engines.step_state import StepState

Drawn = tuple[tuple[RunningSequence, int], list[Token | None]]  # a sequence, the epoch of its launch, its tokens


class Fetched:
    """Tensors of one shape on their way to the host."""

    def __init__(self, like: torch.Tensor, count: int, pinned: bool) -> None:
        self._copies = [
            torch.zeros(like.shape, dtype=like.dtype, pin_memory=True) for _ in range(count if pinned else 0)
        ]
        self._next = 0

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._copies:
            return tensor.clone()
        copy = self._copies[self._next]
        self._next = (self._next + 1) % len(self._copies)
        copy.copy_(tensor, non_blocking=True)
        return copy


@dataclass
class LaunchedStep:
    """Rows whose tokens are not read yet: those of chunks (one token) first, then those of a burst."""

    firsts: list[tuple[RunningSequence, int]]  # with the epoch they were launched in
    going: list[tuple[RunningSequence, int]]
    steps: int
    drawn: torch.Tensor | None = None  # [R] on the host
    ring: torch.Tensor | None = None  # [steps, B] on the host
    rounds: torch.Tensor | None = None  # [steps, B, k + 2] on the host (recorded_speculation.py)
    state: StepState | None = None  # where rounds are noted, once they are known
    held: int = 0  # tokens of proposals that were accepted
    event: Event | None = None
    first_event: Event | None = None  # when `drawn` is there: before the tokens of the others are
    known: list[Token | None] | None = None  # read already
    launched: float = 0.0  # when, on the host's clock
    decodes_only: bool = True  # no piece of a prompt is computed with it

    def read_firsts(self) -> list[tuple[RunningSequence, list[Token | None]]]:
        """The first tokens of new sequences, where they are drawn before the rest is computed; `read` has the rest."""
        if self.first_event is None or self.drawn is None:
            return []
        self.first_event.synchronize()
        found = self._first_tokens()
        self.firsts, self.drawn = [], None
        return _wanted(found)

    def read(self) -> list[tuple[RunningSequence, list[Token | None]]]:
        """Waits for them. Of sequences that were put back since nothing is left."""
        if self.event is not None:
            self.event.synchronize()
        if self.known is not None:
            found = [(each, [token]) for each, token in zip([*self.firsts, *self.going], self.known)]
        else:
            found = self._first_tokens()
            if self.ring is not None:
                rows = self.ring[: self.steps, : len(self.going)].t().tolist()
                found += [(each, list(map(_token, ids))) for each, ids in zip(self.going, rows)]
            found += self._verified()
        return _wanted(found)

    def _first_tokens(self) -> list[Drawn]:
        ids = [] if self.drawn is None else self.drawn[: len(self.firsts)].tolist()
        return [(each, [_token(id)]) for each, id in zip(self.firsts, ids)]

    def _verified(self) -> list[Drawn]:
        """The tokens of rounds. How far each sequence went was the device's to know; now it is the host's."""
        if self.rounds is None:
            return []
        assert self.state is not None
        found: list[Drawn] = []
        for (run, epoch), rounds in zip(self.going, self.rounds[: self.steps].transpose(0, 1).tolist()):
            tokens = [_token(id) for count, *ids in rounds for id in ids[:count]]
            self.held += len(tokens) - self.steps
            if run.epoch == epoch:
                self.state.move_on([run.slot], len(tokens))
                run.cached += len(tokens)
                run.ahead += len(tokens)
            found.append(((run, epoch), tokens))
        return found

    @property
    def proposed(self) -> int:
        return 0 if self.rounds is None else self.steps * len(self.going) * (self.rounds.shape[2] - 2)


def _wanted(found: list[Drawn]) -> list[tuple[RunningSequence, list[Token | None]]]:
    """Without sequences that have ended, or were put back since they were launched."""
    return [(run, tokens) for (run, epoch), tokens in found if not run.gone and run.epoch == epoch]


def _token(id: int) -> Token | None:
    return Token(id) if id >= 0 else None
