"""Rows of every stage are compared by what they say; a verdict or a class is part of it."""

from __future__ import annotations

from collections import Counter

import pytest

from erniekit.data.classification import ClassRow
from erniekit.data.formats.unpaired import unpaired
from erniekit.data.preference import Preference
from erniekit.data.quality import is_near_empty, length_line, row_key, size_of
from erniekit.data.types import ChatMessage, Conversation

ASKED, SAID, OTHER = ChatMessage("user", "1 + 1?"), ChatMessage("assistant", "2."), ChatMessage("assistant", "3.")
PAIR = {"prompt": "1 + 1?", "chosen": "2.", "rejected": "3."}


@pytest.mark.parametrize(
    ("row", "same", "different"),
    [
        (
            [Conversation((ASKED, SAID))],
            [Conversation((ASKED, SAID), unused=("id",))],
            [Conversation((ASKED, OTHER))],
        ),
        (
            [Preference((ASKED,), (SAID,), (OTHER,))],
            [Preference((ASKED,), (SAID,), (OTHER,), score_delta=2.0)],
            [Preference((ASKED,), (OTHER,), (SAID,))],
        ),
        (
            unpaired({"prompt": "1 + 1?", "completion": "2.", "label": True}),
            unpaired({"prompt": "1 + 1?", "completion": "2.", "label": 1, "id": 7}),
            unpaired({"prompt": "1 + 1?", "completion": "2.", "label": False}),
        ),
        (unpaired(PAIR), unpaired(PAIR), unpaired(PAIR | {"chosen": "Two."})),
        ([ClassRow("a river", "en")], [ClassRow("a river", "en", ("id",))], [ClassRow("a river", "zh")]),
    ],
)
def test_rows_of_every_stage_are_the_same_when_they_say_the_same(row, same, different):
    assert row_key(row) == row_key(same) != row_key(different)
    assert size_of(row) > 0


def test_a_near_empty_answer_is_found_in_judged_answers_and_a_class_has_none():
    assert is_near_empty(unpaired({"prompt": "1 + 1?", "completion": "...", "label": False}))
    assert not is_near_empty(unpaired({"prompt": "...", "completion": "2.", "label": True}))
    assert not is_near_empty([ClassRow("...", "en")])


def test_the_bars_of_lengths_cover_the_shortest_and_the_longest() -> None:
    assert length_line(Counter({14: 3}), "characters").endswith("(9 to 16)")
    assert length_line(Counter({1: 1, 22: 3}), "characters").endswith("(1 to 32)")
    assert length_line(Counter({2: 1, 32: 3}), "characters").endswith("(2 to 32)")
