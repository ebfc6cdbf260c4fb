"""Speculative decoding in steps of fixed shapes: proposing, verifying and counting on the device.

Used by recorded.py; speculation.py is the definition. A round verifies every row's proposal and makes its next one: a
row takes 1 to k + 1 tokens, so that its place moves by a number only the device knows until the launch is read. The
host reads a launch before it makes the next. B rows of a batch, k tokens of a proposal, T tokens of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from erniekit.kernels.paged_attention import PagedTokens, Tiles, TurnAngles
from erniekit.kernels.sampling import draw
from erniekit.serve.engines.flat_layers import logits_of, run_flat, run_mtp
from erniekit.serve.engines.paged import PagedCache
from erniekit.serve.engines.sampler import params_of
from erniekit.serve.engines.step_state import PLACE, StepState


@dataclass(frozen=True)
class StepTensors:
    """What steps share: the state of slots, the cache, and the angles of all places."""

    state: StepState
    cache: PagedCache
    cos: torch.Tensor
    sin: torch.Tensor
    halves: bool
    length: int  # most tokens of a sequence

    def turns(self, at: torch.Tensor) -> TurnAngles:
        return TurnAngles(self.cos, self.sin, at, self.halves)

    def tokens_at(self, rows: torch.Tensor, places: torch.Tensor) -> PagedTokens:
        """A place behind the longest sequence has no block: what is computed there goes to the padding slot's."""
        inside = places < self.length
        rows = torch.where(inside, rows, self.state.padding_slot)
        return PagedTokens(rows, torch.where(inside, places, 0), self.state.tables, self.cache.size)

    def drawn(self, logits: torch.Tensor, slots: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        state = self.state
        params = params_of(state.floats.there.index_select(0, slots), state.integers.there.index_select(0, slots))
        return draw(logits, params, places)

    def likeliest(self, logits: torch.Tensor, slots: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Token 0 where the logits are not finite: it is only proposed."""
        state = self.state
        params = params_of(state.floats.there.index_select(0, slots), state.integers.there.index_select(0, slots))
        greedy = params._replace(temperature=torch.zeros_like(params.temperature))
        return draw(logits, greedy, places).clamp(min=0)


class RecordedProposals:
    """k: tokens of a proposal; burst: rounds of a launch; most: rows of the largest batch."""

    def __init__(self, tensors: StepTensors, k: int, burst: int, most: int) -> None:
        self.tensors, self.k = tensors, k
        handle = tensors.state.tokens.device
        self.tokens = torch.zeros(tensors.state.padding_slot + 1, k, dtype=torch.int64, device=handle)
        # Of each round and row: the number of tokens it took, and k + 1 tokens of which those are the first.
        self.ring = torch.zeros(burst, most, k + 2, dtype=torch.int64, device=handle)

    def after_chunk(
        self,
        model: Any,
        hidden_TH: torch.Tensor,
        ids: torch.Tensor,
        where: PagedTokens,
        tiles: Tiles,
        last: torch.Tensor,
        slots: torch.Tensor,
        drawn: torch.Tensor,
    ) -> None:
        """The MTP layer over tokens of prompts. ids [T]: the token behind each, but for the `last` of rows that draw:
        there it is `drawn`. slots: of those rows, the padding slot where there is no row."""
        state = self.tensors.state
        spare = ids.shape[0]
        at = torch.where(slots == state.padding_slot, spare, last)
        following = torch.cat((ids, ids[:1])).index_copy_(0, at, drawn.clamp(min=0))[:spare]
        x, added = run_mtp(
            model, following, hidden_TH, where, self.tensors.turns(where.places), self.tensors.cache, tiles
        )
        x, added = x.index_select(0, last), added.index_select(0, last)
        self._propose(model, slots, where.places.index_select(0, last), x, added)

    def round(self, model: Any, rows: torch.Tensor, adapters: Any, number: torch.Tensor) -> torch.Tensor:
        """Verifies the proposals of these slots [B] and makes the next. number: of this round in the launch."""
        tensors, state, k = self.tensors, self.tensors.state, self.k
        size = rows.shape[0]
        numbers = state.numbers.there.index_select(0, rows)
        newest = numbers[:, PLACE].long()  # the place of each row's last token, which the model has not read
        proposed = self.tokens.index_select(0, rows)
        ids = torch.cat((state.tokens.index_select(0, rows)[:, None], proposed), dim=1).flatten()
        places = (newest[:, None] + torch.arange(k + 1, device=rows.device)).flatten()
        slots = rows.repeat_interleave(k + 1)
        where = tensors.tokens_at(slots, places)
        turns = tensors.turns(where.places)
        adapters.of = state.models.there.index_select(0, slots)
        # Attention of each token for itself, by the kernel of a plain step.
        x, added = run_flat(model, model.embed_ids(ids), where, turns, tensors.cache, None)
        drawn = tensors.drawn(logits_of(model, x, added), slots, places + 1).view(size, k + 1)
        held = (drawn[:, :k] == proposed).long().cumprod(1).sum(1)  # tokens of each proposal that hold
        taken = held + 1
        token = drawn.gather(1, held[:, None])[:, 0].clamp(min=0)
        out = torch.cat((taken[:, None], drawn), dim=1)
        self.ring[:, :size].index_copy_(0, number, out[None])

        x, added = run_mtp(model, drawn.clamp(min=0).flatten(), x + added, where, turns, tensors.cache)
        end = torch.arange(size, device=rows.device) * (k + 1) + held
        self._propose(model, rows, newest + held, x.index_select(0, end), added.index_select(0, end))
        state.tokens.index_copy_(0, rows, token)
        # The padding slot does not advance: its one block is overwritten at each step.
        moved = numbers[:, :2] + torch.where(rows != state.padding_slot, taken, 0)[:, None].int()
        state.numbers.there[:, :2].index_copy_(0, rows, moved)
        return drawn

    def _propose(
        self, model: Any, slots: torch.Tensor, places: torch.Tensor, x: torch.Tensor, added: torch.Tensor
    ) -> None:
        """Of these slots [R], from the layer's state at `places`: a residual and what is added to it."""
        tensors = self.tensors
        proposed: list[torch.Tensor] = []
        for depth in range(self.k):
            if depth:
                where = tensors.tokens_at(slots, places)
                turns = tensors.turns(where.places)
                x, added = run_mtp(model, proposed[-1], x + added, where, turns, tensors.cache)
            proposed.append(tensors.likeliest(logits_of(model, x, added), slots, places + 2))
            places = places + 1
        self.tokens.index_copy_(0, slots, torch.stack(proposed, dim=1))
