"""Answers that are judged one by one (stage KTO): Unpaired -> UnpairedSample, and how a row becomes tokens.

formats/unpaired.py makes the first; unpaired_source.py keeps the second, and gives each the answer of another row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from erniekit.data.assemble import Assembled, Dropped
from erniekit.data.preference import PairRules, Preference
from erniekit.data.preference_assemble import encode_answer, joined, turns_to_drop
from erniekit.data.template import TemplateRefused
from erniekit.data.thinking import Thinking, has_thought
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import IGNORE, ChatMessage, RowContent, Sample


@dataclass(frozen=True)
class Unpaired:
    """A prompt, an answer to it, and whether it is one to learn or to avoid."""

    prompt: tuple[ChatMessage, ...]
    answer: tuple[ChatMessage, ...]  # as a side of a Preference
    desirable: bool
    tools: tuple[dict[str, Any], ...] = ()
    unused: tuple[str, ...] = field(default=(), compare=False)

    def contents(self) -> RowContent:
        return RowContent((self.prompt, self.answer), self.answer, self.tools, label=str(self.desirable))


@dataclass(frozen=True)
class UnpairedSample(Sample):
    """ids are the prompt and the whole answer, so that the answer can be laid behind another prompt; the last position
    has no label."""

    prompt: int  # tokens
    desirable: bool
    mismatched: Sample | None = None  # this prompt with another row's answer, once one is chosen
    reference: tuple[float, ...] | None = None  # log-probability sums of both, where they are known already

    def parts(self) -> tuple[int, int, int, float]:
        """As preference.PARTS: the prompt is what is shared, and there is no second answer."""
        return self.prompt, len(self.ids), len(self.ids), 1.0 if self.desirable else -1.0

    def behind(self, other: UnpairedSample, most: int) -> Sample:
        """This answer behind the other's prompt, cut to `most` tokens."""
        ids = np.concatenate([other.ids[: other.prompt], self.ids[self.prompt :]])
        labels = np.concatenate([other.labels[: other.prompt - 1], self.labels[self.prompt - 1 :]])
        cut = labels[:most].copy()
        if len(labels) > most:
            cut[-1] = IGNORE  # its token is beyond the row
        return Sample(ids[:most], cut)


def assemble_unpaired(
    row: Unpaired,
    tokenizer: Tokenizer,
    max_seq_len: int,
    rules: PairRules,
    overlong: Literal["drop", "truncate"] = "drop",
    thinking: Thinking = "all",
) -> Assembled | Dropped:
    """As assemble_pair: older turns go first, then, with overlong: truncate, the answer's end."""
    pair = Preference(row.prompt, row.answer, row.answer, row.tools)
    try:
        past, question, answer = encode_answer(pair, row.answer, tokenizer, rules, thinking)
    except TemplateRefused as refused:
        return Dropped.by_template(refused)
    if not question:
        return Dropped("template", "the chat template renders the prompt as nothing")
    begin = [] if not past else [id for id in past[0].query_ids[:1] if id == tokenizer.begin_id]
    dropped = turns_to_drop(past, question, len(begin), min(rules.max_prompt_len, max_seq_len - len(answer.ids)))
    prompt = joined(past[dropped:]) + question
    if dropped and prompt[:1] != begin:
        prompt = begin + prompt
    if len(prompt) > rules.max_prompt_len:
        most = rules.max_prompt_len
        return Dropped("overlong", f"its last question alone has {len(prompt)} tokens, max_prompt_len is {most}")
    cut = len(prompt) + len(answer.ids) - max_seq_len
    if cut > 0:
        if overlong == "drop" or max_seq_len - len(prompt) < 1:
            parts = f"{len(prompt)} + {len(answer.ids)}"
            return Dropped("overlong", f"its last question and answer have {parts} tokens and {max_seq_len} fit")
        answer = answer.cut(max_seq_len - len(prompt))
    if not any(answer.scored):
        return Dropped("untrained", "the answer has nothing to score")
    end, eos = tokenizer.end_id, tokenizer.eos_id
    scored = [(eos if id == end else id) if on else IGNORE for id, on in zip(answer.ids, answer.scored)]
    labels = [IGNORE] * (len(prompt) - 1) + scored + [IGNORE]
    sample = UnpairedSample(
        np.array(prompt + answer.ids, np.int32), np.array(labels, np.int32), len(prompt), row.desirable
    )
    thoughts = [turn.thought for turn in past[dropped:]] + answer.thoughts
    return Assembled(
        sample,
        dropped,
        max(0, cut),
        thoughts=sum(map(has_thought, (*row.prompt, *row.answer))),
        thoughts_in=sum(count > 0 for count in thoughts),
        thought_tokens=sum(thoughts),
    )
