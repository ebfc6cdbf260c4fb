"""Preference rows for a reward model: both whole sequences in one row, their prompt once, a label at each end.

recipes/reward.py opens them through token_cache.open_source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from erniekit.data.assemble import Assembled, Dropped
from erniekit.data.formats import PREFERENCE_FORMATS, detect, parse_pair
from erniekit.data.formats.columns import Columns
from erniekit.data.formats.files import decode
from erniekit.data.formats.pairs import number
from erniekit.data.preference import PairSample, Preference
from erniekit.data.preference_assemble import Answer, assemble_pair
from erniekit.data.template import Turn
from erniekit.data.token_cache import PairSource, RowKind, not_pairs
from erniekit.data.tokenise import TokeniseJob
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import IGNORE, RowProblem


@dataclass(frozen=True)
class RewardJob(TokeniseJob):
    def more_key(self) -> dict[str, Any]:
        return {"rows": "rewards"}

    def read(self, raw: Any, line: int) -> Sequence[Preference] | RowProblem:
        pair = parse_pair(raw, line, self.path, self.format, columns=self.columns)
        if isinstance(pair, RowProblem):
            return pair
        row = decode(raw, self.columns)
        if isinstance(row, dict) and row.get("margin") is not None:  # TRL's name
            unused = tuple(name for name in pair.unused if name != "margin")
            pair = replace(pair, score_delta=number(row["margin"], "margin"), unused=unused)
        return [pair]

    def assemble(self, row: Preference, known: list[Turn] | None = None) -> Assembled | Dropped:
        assert self.pairs is not None
        # One token less than a row of log-probabilities takes: here the last token of each answer is read, too.
        return assemble_pair(
            row, self.tokenizer, self.max_seq_len - 1, self.pairs, self.overlong, False, self.thinking, ends_scored
        )


def ends_scored(
    prompt: list[int], chosen: Answer, rejected: Answer, delta: float, tokenizer: Tokenizer, compat: bool
) -> PairSample:
    """prompt | chosen | rejected; the rejected answer continues the prompt."""
    ids, shared, second = prompt + chosen.ids + rejected.ids, len(prompt), len(prompt) + len(chosen.ids)
    labels = np.full(len(ids), IGNORE, np.int32)
    labels[[second - 1, len(ids) - 1]] = 0
    return PairSample(np.array(ids, np.int32), labels, shared, second, second, delta)


def reward_rows(path: Any, format: str | None, columns: Columns = ()) -> RowKind:
    """format: detected when not given; rows without two answers are refused."""
    found = detect(path, columns=columns) if format is None else None
    if found is not None and not found.preference:
        raise not_pairs(path, found.why, "a reward model")
    if format is not None:
        PREFERENCE_FORMATS.get(format)  # an unknown name is said before the file is read
    return RowKind(format or (found.format if found else ""), RewardJob, PairSource)
