"""Speculative decoding by a model's own MTP layer: it proposes tokens, the next step of the model verifies them.

Used by plain_step.py; this is the definition of what recorded_speculation.py computes on a device. Each position of a
proposal is sampled as it would be without one, by the model's own logits and the request's own seed, and a proposal
holds as far as it equals what was sampled. Greedy or not, the tokens are therefore those of plain decoding: for a
proposal of one fixed token this is rejection sampling, which accepts it with the model's probability of that token.

The MTP layer has keys and values of its own in the cache. Its entry at place t is of the model's state at t and the
token at t + 1. For more than one token the layer continues from its own output; those entries are written again when
the model's state at their place is known. Wrong or missing entries make worse proposals and never another answer.
T tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from erniekit.serve.engines.base import Token
from erniekit.serve.engines.paged import PagedAttention, PagedCache, SequencePiece, Step, install_mtp
from erniekit.serve.engines.sampler import SamplerRow, sample
from erniekit.serve.engines.sequence import RunningSequence

Planned = tuple[RunningSequence, SequencePiece]


def sample_verified(
    logits: torch.Tensor, rows: Sequence[SamplerRow], proposals: Sequence[Sequence[int]]
) -> list[list[Token | None]]:
    """logits [one more than its proposals for each row, V] -> the tokens of each row: those of its proposal that hold,
    and the one behind them. The last may be None, as `sample` gives it."""
    firsts, at = [], 0
    for proposed in proposals:
        firsts.append(at)
        at += 1 + len(proposed)
    out: list[list[Token | None]] = [[] for _ in rows]
    open_rows = list(range(len(rows)))
    while open_rows:
        places = torch.tensor([firsts[k] + len(out[k]) for k in open_rows], device=logits.device)
        current = [_after(rows[k], out[k]) for k in open_rows]
        following = []
        for k, token in zip(open_rows, sample(logits.index_select(0, places), current)):
            depth = len(out[k])
            out[k].append(token)
            if token is None or depth >= len(proposals[k]) or token.id != proposals[k][depth]:
                continue
            if token.id not in rows[k].stop_ids or rows[k].sampling.ignore_stop:
                following.append(k)
        open_rows = following
    return out


def _after(row: SamplerRow, tokens: Sequence[Token | None]) -> SamplerRow:
    """The row with tokens that were sampled since; penalties depend on them."""
    if not tokens:
        return row
    return replace(row, generated=[*row.generated, *(token.id for token in tokens if token is not None)])


class MtpProposer:
    """most: tokens of a proposal."""

    def __init__(self, cache: PagedCache, most: int) -> None:
        self.cache, self.most = cache, most

    def propose(
        self,
        model: Any,
        hidden_TH: torch.Tensor,
        group: Sequence[Planned],
        tokens: Sequence[Sequence[Token | None] | None],
    ) -> None:
        """Sets the proposals of sequences that go on. hidden: the model's states of the pieces' tokens, before its
        norm. tokens: what was sampled of each piece; None where a prompt goes on."""
        inner = install_mtp(model, self.cache)
        computed: list[tuple[RunningSequence, SequencePiece, torch.Tensor]] = []  # with the rows of its states
        at = 0
        for (run, piece), sampled in zip(group, tokens):
            run.proposals = []
            if run.pooled is None and None not in (sampled or ()):
                ids = [*run.ids, *(token.id for token in sampled or () if token is not None)]
                stop = piece.stop if sampled is None else len(ids) - 1
                following = SequencePiece(ids[1:], piece.start, stop, run.table)
                computed.append((run, following, torch.arange(at, at + stop - piece.start)))
            at += piece.stop - piece.start
        if not computed:
            return
        computed.sort(key=lambda each: not each[1].decodes)
        step = Step.of([piece for _, piece, _ in computed], self.cache.size, hidden_TH.device)
        states = hidden_TH.index_select(0, torch.cat([rows for _, _, rows in computed]).to(hidden_TH.device))
        states = self._run(model, inner, step, states).index_select(0, step.last)
        open_rows = [k for k, (run, piece, _) in enumerate(computed) if _goes_on(run, piece)]
        self._extend(model, inner, [computed[k][:2] for k in open_rows], states[open_rows])

    def _extend(self, model: Any, inner: PagedAttention, rows: list[Planned], states_RH: torch.Tensor) -> None:
        """A token for each row by its state; then the layer's state at the next place, by that token."""
        while rows:
            for (run, _), of_row in zip(rows, model.head_logits(model.norm(states_RH))):
                run.proposals.append(int(of_row[: run.job.vocab].argmax()))
            kept = [k for k, (run, piece) in enumerate(rows) if self._has_room(run, piece)]
            rows = [(run, _next_place(run, piece)) for run, piece in (rows[k] for k in kept)]
            if rows:
                step = Step.of([piece for _, piece in rows], self.cache.size, states_RH.device)
                states_RH = self._run(model, inner, step, states_RH[kept])

    def _has_room(self, run: RunningSequence, piece: SequencePiece) -> bool:
        """Whether a further token may be proposed, and its place has a block."""
        return len(run.proposals) < self.most and piece.stop < len(run.table) * self.cache.size

    @staticmethod
    def _run(model: Any, inner: PagedAttention, step: Step, hidden_TH: torch.Tensor) -> torch.Tensor:
        inner.step = step
        out: torch.Tensor = model.mtp[0](model.embed_ids(step.tokens), hidden_TH[None], model.context(step.positions))
        return out[0]


def _next_place(run: RunningSequence, piece: SequencePiece) -> SequencePiece:
    return SequencePiece([*piece.ids, run.proposals[-1]], piece.stop, piece.stop + 1, piece.table)


def _goes_on(run: RunningSequence, piece: SequencePiece) -> bool:
    """Whether a proposal behind these tokens can be of use; piece: each place's next token. Not under a grammar: its
    matcher only goes forward, and could not repeat a step that failed behind a proposal."""
    if piece.stop < len(run.ids) or run.matcher is not None:  # the first: of its prompt more is to be read
        return False
    sampling = run.job.sampling
    ended = piece.ids[-1] in run.job.stop_ids and not sampling.ignore_stop
    return not ended and len(piece.ids) + 1 - len(run.job.prompt) + 1 < sampling.max_tokens
