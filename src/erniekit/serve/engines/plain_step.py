"""A step by the model's own modules, its tokens read at once: the definition of what the engine computes.

Used by embedded.py: on devices that record nothing, for prompts with pictures and for embeddings, where `decoding:
exact` selects it, and it repeats the sequences of a recorded step that failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from erniekit.data.types import More
from erniekit.model_contract import picture_tower
from erniekit.models.layers.router import Router
from erniekit.serve.engines.base import GenerationJob, SamplingParams, Token, TokenStream
from erniekit.serve.engines.paged import PagedAttention, PagedCache, SequencePiece, Step, install
from erniekit.serve.engines.sequence import RunningSequence, sequences_of
from erniekit.serve.engines.speculation import MtpProposer, Planned, sample_verified
from erniekit.serve.engines.vision_input import FeatureCache


class PlainSteps:
    """models: their layers are given the paged cache. proposals: tokens that the MTP layer proposes, if any."""

    def __init__(
        self, models: Mapping[str, nn.Module], cache: PagedCache, features: FeatureCache, proposals: int = 0
    ) -> None:
        self.models: dict[str, nn.Module] = {}
        self.cache, self.features = cache, features
        self.proposer = MtpProposer(cache, proposals) if proposals else None
        self._attention: dict[str, list[PagedAttention]] = {}
        for name, model in models.items():
            self.add(name, model)
        self.device = next(next(iter(models.values())).parameters()).device

    def add(self, name: str, model: nn.Module) -> None:
        self.models[name], self._attention[name] = model, install(model, self.cache)

    def remove(self, name: str) -> None:
        del self.models[name], self._attention[name]

    def run(self, name: str, group: Sequence[Planned], propose: bool = True) -> list[list[Token | None]]:
        """The tokens of each sequence of which this was the last piece: one, or several where its proposal held."""
        model = self.models[name]
        step = Step.of([piece for _, piece in group], self.cache.size, self.device)
        for inner in self._attention[name]:
            inner.step = step
        embedded = self._show(name, model.embed_ids(step.tokens), group)  # type: ignore[operator]
        context = model.context(step.positions, more=More(modality=step.modality))  # type: ignore[operator]
        hidden = model.run_layers(embedded, context)  # type: ignore[operator]
        self._pool(model, hidden[0], group)
        sampled = {k: i for i, k in enumerate(k for k, each in enumerate(group) if _is_sampled(*each))}
        tokens = self._sampled(model, hidden[0], step, [group[k] for k in sampled], list(sampled)) if sampled else []
        if propose and self.proposer is not None:
            of_piece = [tokens[sampled[k]] if k in sampled else None for k in range(len(group))]
            self.proposer.propose(model, hidden[0], group, of_piece)
        return tokens

    def probe(self, names: Iterable[str], propose: bool = True) -> str | None:
        """None where a single token works with each of these models; else the problem, empty for want of a block."""
        table: list[int] = []
        if not self.cache.grow(table, 1):
            return ""
        job = GenerationJob((0,), "", SamplingParams(1, temperature=0), frozenset(), 1)
        try:
            for name in names:
                probe = sequences_of(TokenStream((job,)))[0]
                self.run(name, [(probe, SequencePiece(probe.ids, 0, 1, table))], propose)
            return None
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.cache.release(table)

    @staticmethod
    def _sampled(
        model: nn.Module, hidden_TH: torch.Tensor, step: Step, group: Sequence[Planned], numbers: Sequence[int]
    ) -> list[list[Token | None]]:
        """numbers: of these pieces in the step."""
        proposals = [piece.ids[len(run.ids) : piece.stop] for run, piece in group]
        counts = torch.tensor([len(proposed) for proposed in proposals])
        # The last token that is known, and each of its proposal.
        back = torch.cat([torch.arange(-count, 1) for count in counts.tolist()]).to(step.last.device)
        ends = step.last[list(numbers)].repeat_interleave((counts + 1).to(step.last.device)) + back
        last = model.norm(hidden_TH.index_select(0, ends))  # type: ignore[operator]
        return sample_verified(model.head_logits(last), [run.row() for run, _ in group], proposals)  # type: ignore[operator]

    @staticmethod
    def _pool(model: nn.Module, hidden_TH: torch.Tensor, group: Sequence[Planned]) -> None:
        at = 0
        for run, piece in group:
            end = at + piece.stop - piece.start
            if run.pooled is not None:
                run.pooled.add(hidden_TH[at:end], piece.start, model.norm)  # type: ignore[arg-type]
            at = end

    def _show(self, name: str, x_1TH: torch.Tensor, group: Sequence[Planned]) -> torch.Tensor:
        """The embeddings with the features of pictures in the places of their tokens."""
        model, features, places, at = self.models[name], [], [], 0
        for run, piece in group:
            if run.features is not None:
                read = run.features.read(piece.start, piece.stop, name, model, self.features, self.device)
                for found, where in read:
                    features.append(found)
                    places.append(torch.from_numpy(where - piece.start + at))
                if piece.stop >= len(run.job.prompt):
                    run.features.forget()
            at += piece.stop - piece.start
        if not features:
            return x_1TH
        tower = picture_tower(model)
        assert tower is not None, "pictures are read for models that take them"
        result: torch.Tensor = tower.insert(x_1TH, torch.cat(features), torch.cat(places).to(self.device))
        return result


def _is_sampled(run: RunningSequence, piece: SequencePiece) -> bool:
    return piece.stop >= len(run.ids) and run.pooled is None


def remove_expert_capacity(model: nn.Module) -> None:
    """Expert capacity is a rule of training: in serving, a token's experts must not depend on the other requests."""
    for module in model.modules():
        if isinstance(module, Router):
            module.capacity = module.most = None
