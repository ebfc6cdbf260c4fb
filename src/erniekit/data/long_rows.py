"""Rows that give an example per answer, each with all that comes before: measured by one pass over the longest.

Called by tokenise.py. Rendering every example of a long row by itself costs the square of its turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from erniekit.data.preference import Preference
from erniekit.data.template import TemplateRefused, Turn, least_tokens, turns, uses_tools
from erniekit.data.thinking import has_thought
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import Conversation

LONG_ROW = 16  # examples; with fewer, looking first saves nothing


class LongRow:
    """The examples of one row, shortest first: the messages of each are how those of the next begin."""

    def __init__(
        self, parsed: Sequence[Conversation | Preference], tokenizer: Tokenizer, max_seq_len: int, compat: bool
    ) -> None:
        self._parsed, self._max_seq_len = parsed, max_seq_len
        self.may_fit = len(parsed)  # examples worth rendering: the prompts of the others are too long by themselves
        self._turns: list[Turn] | None = None
        longest = parsed[-1]
        if len(parsed) < LONG_ROW or compat or not isinstance(longest, Conversation):
            return
        if any(map(has_thought, longest.messages)):  # thoughts of earlier answers come and go with their turn
            return
        try:
            if uses_tools(longest):
                self.may_fit = self._fitting(longest, tokenizer)
            else:
                found = turns(longest, tokenizer)
                whole = len(found) == sum(m.role == "assistant" for m in longest.messages)
                self._turns = found if whole else None
        except TemplateRefused:
            return

    def turns(self, number: int) -> list[Turn] | None:
        """Those of example `number`, where they are the beginning of the longest's; None: they must be rendered."""
        if self._turns is None:
            return None
        row = self._parsed[number]
        assert isinstance(row, Conversation)
        trained = [m.trained for m in row.messages if m.role == "assistant"]
        return [
            turn if turn.trained == learnt else replace(turn, trained=learnt)
            for turn, learnt in zip(self._turns, trained)
        ]

    @property
    def too_long(self) -> str:
        return f"what comes before the answer has more than the {self._max_seq_len} tokens that fit"

    def _fitting(self, longest: Conversation, tokenizer: Tokenizer) -> int:
        least = least_tokens(longest, tokenizer)
        if not least:
            return len(self._parsed)
        # Only with tools is a prompt one piece; others lose their oldest turns to fit.
        pieces = list(accumulate((m.role == "tool" or bool(m.tool_calls) for m in longest.messages), max))
        too_long = []
        for row in self._parsed:
            assert isinstance(row, Conversation)
            size = len(row.messages)
            too_long.append((bool(row.tools) or pieces[size - 1]) and least[size - 1] > self._max_seq_len)
        first = too_long.index(True) if True in too_long else len(too_long)
        return first if all(too_long[first:]) else len(too_long)
