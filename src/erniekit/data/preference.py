"""The nouns of preference data, in the order a line meets them: Preference -> PairSample.

formats/ makes the first, preference_assemble.py turns it into the second, token_cache.py keeps that,
preference_collate.py lays it out for the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from erniekit.data.types import ChatMessage, RowContent, Sample


@dataclass(frozen=True)
class Preference:
    """A prompt and two answers to it, the better one first."""

    prompt: tuple[ChatMessage, ...]  # its last message is not the assistant's
    chosen: tuple[ChatMessage, ...]  # assistant, then user and assistant in turn where an answer takes several
    rejected: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    score_delta: float = 1.0  # how much better, in the data's own units
    unused: tuple[str, ...] = field(default=(), compare=False)  # as in Conversation

    def contents(self) -> RowContent:
        return RowContent((self.prompt, self.chosen, self.rejected), (*self.chosen, *self.rejected), self.tools)


@dataclass(frozen=True)
class PairRules:
    """What decides a pair's tokens, besides what decides any sample's."""

    max_prompt_len: int  # tokens
    mask_out_eos_token: bool = True


@dataclass(frozen=True)
class PairSample(Sample):
    """What both answers see, the chosen part, the rejected part, end to end; computed once, for two sequences.

    Places below `rejected` are one sequence. Those from `rejected` on continue the first `shared` places instead.
    Labels below `scored` are tokens of the chosen answer, labels from there on of the rejected one.
    """

    shared: int
    rejected: int
    scored: int
    score_delta: float = 1.0
    reference: tuple[float, ...] | None = None  # log-probability sums of both answers, where they are known already

    def parts(self) -> tuple[int, int, int, float]:
        return self.shared, self.rejected, self.scored, self.score_delta


# PairSample.parts() in the token cache
PARTS = np.dtype([("shared", "<i4"), ("rejected", "<i4"), ("scored", "<i4"), ("score_delta", "<f4")])
