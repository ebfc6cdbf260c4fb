"""One preference to one pair sample: which prompt turns fit, how both answers lie in the row, what is scored.

Called by the token cache's workers. `compat` reproduces ERNIEKit's row, its fault included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from erniekit.data.assemble import Assembled, Dropped
from erniekit.data.preference import PairRules, PairSample, Preference
from erniekit.data.template import TemplateRefused, Turn, turns
from erniekit.data.thinking import Thinking, has_thought, kept
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import IGNORE, ChatMessage, Conversation


@dataclass(frozen=True)
class Answer:
    """One of the two, behind the prompt."""

    ids: list[int]
    scored: list[bool]  # whether this token's log-probability counts
    thoughts: list[int]  # of each turn, how many tokens are reasoning

    def cut(self, length: int) -> Answer:
        return Answer(self.ids[:length], self.scored[:length], self.thoughts)


def assemble_pair(
    pair: Preference,
    tokenizer: Tokenizer,
    max_seq_len: int,
    rules: PairRules,
    overlong: Literal["drop", "truncate"] = "drop",
    compat: bool = False,
    thinking: Thinking = "all",
    put: Callable[..., PairSample] | None = None,
) -> Assembled | Dropped:
    """put: lays the row out; lay_out when not given."""
    try:
        past, question, chosen, rejected = _encode(pair, tokenizer, rules, thinking)
    except TemplateRefused as refused:
        return Dropped.by_template(refused)
    if not question:
        return Dropped("template", "the chat template renders the prompt as nothing")
    space = max_seq_len + (not compat)  # of prompt and answers; see lay_out
    longest = space if compat else rules.max_prompt_len  # ERNIEKit has max_prompt_len, and no use for it
    answers = len(chosen.ids) + len(rejected.ids)
    # ERNIEKit lets the begin token go with the oldest turn.
    begin = [] if compat or not past else [id for id in past[0].query_ids[:1] if id == tokenizer.begin_id]
    dropped = turns_to_drop(past, question, len(begin), min(longest, space - answers))
    prompt = joined(past[dropped:]) + question
    if dropped and prompt[:1] != begin:
        prompt = begin + prompt
    if len(prompt) > longest and not compat:
        return Dropped("overlong", f"its last question alone has {len(prompt)} tokens, max_prompt_len is {longest}")
    cut = len(prompt) + answers - space
    if cut > 0:
        if overlong == "drop" or space - len(prompt) < 2:
            parts = f"{len(prompt)} + {len(chosen.ids)} + {len(rejected.ids)}"
            return Dropped("overlong", f"its last question and answers have {parts} tokens and {space} fit")
        chosen, rejected = _cut(chosen, rejected, space - len(prompt))
    if not any(chosen.scored) or not any(rejected.scored):
        return Dropped("untrained", "an answer has nothing to score")
    alike = min(len(chosen.ids), len(rejected.ids)) if cut > 0 else None
    if chosen.ids[:alike] == rejected.ids[:alike] and not compat:
        return Dropped("same_answers", "both answers are the same" + (" as far as they fit" if cut > 0 else ""))
    sample = (put or lay_out)(prompt, chosen, rejected, pair.score_delta, tokenizer, compat)
    thoughts = [turn.thought for turn in past[dropped:]] + [*chosen.thoughts, *rejected.thoughts]
    return Assembled(
        sample,
        dropped,
        max(0, cut),
        thoughts=sum(map(has_thought, (*pair.prompt, *pair.chosen, *pair.rejected))),
        thoughts_in=sum(count > 0 for count in thoughts),
        thought_tokens=sum(thoughts),
    )


def encode_answer(
    pair: Preference, answer: tuple[ChatMessage, ...], tokenizer: Tokenizer, rules: PairRules, thinking: Thinking
) -> tuple[list[Turn], list[int], Answer]:
    """Earlier turns, the last question through the generation prompt, and one of the answers."""
    before = tuple(replace(message, trained=False) for message in pair.prompt)
    count = sum(message.role == "assistant" for message in before)
    all_turns = turns(Conversation(kept(before + _all_trained(answer), thinking), pair.tools), tokenizer)
    if len(all_turns) < count + sum(message.role == "assistant" for message in answer):
        # Tools, or a template that rewrites earlier turns: all before the last answer is one query.
        past, last = [], all_turns
    else:
        past, last = all_turns[:count], all_turns[count:]
    encoded = _answer(last, tokenizer, rules.mask_out_eos_token, thinking == "mask")
    return past, last[0].query_ids, encoded


def _encode(
    pair: Preference, tokenizer: Tokenizer, rules: PairRules, thinking: Thinking
) -> tuple[list[Turn], list[int], Answer, Answer]:
    """Earlier turns, the last question through the generation prompt, and both answers."""
    both = [encode_answer(pair, answer, tokenizer, rules, thinking) for answer in (pair.chosen, pair.rejected)]
    pasts, questions, answers = [b[0] for b in both], [b[1] for b in both], [b[2] for b in both]
    if pasts[0] != pasts[1]:
        questions = [joined(past) + question for past, question in zip(pasts, questions)]
        pasts = [[], []]
    common = _common(*questions)  # less than the question only where an answer's earlier turns are part of a query
    chosen, rejected = (
        Answer(question[common:] + answer.ids, [False] * (len(question) - common) + answer.scored, answer.thoughts)
        for question, answer in zip(questions, answers)
    )
    return pasts[0], questions[0][:common], chosen, rejected


def _all_trained(answer: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    return tuple(replace(message, trained=message.role == "assistant") for message in answer)


def _answer(turns_: list[Turn], tokenizer: Tokenizer, mask_out_eos: bool, mask_thoughts: bool) -> Answer:
    """The first turn's answer, then whole turns; user messages in between are not scored."""
    ids: list[int] = []
    scored: list[bool] = []
    for number, turn in enumerate(turns_):
        query = turn.query_ids if number else []
        answer = turn.answer_ids
        if number == len(turns_) - 1 and not (answer and tokenizer.is_special(answer[-1])):
            answer = [*answer, tokenizer.eos_id]  # the template closes answers with nothing the model could stop at
        ends = bool(answer) and tokenizer.is_special(answer[-1])
        ids += query + answer
        masked = turn.thought if mask_thoughts else 0
        scored += [False] * (len(query) + masked) + [True] * (len(answer) - ends - masked) + [not mask_out_eos] * ends
    return Answer(ids, scored, [turn.thought for turn in turns_])


def turns_to_drop(past: list[Turn], question: list[int], begin: int, space: int) -> int:
    """How many of the oldest turns go so that the rest fits, `begin` tokens in front; all if it never does."""
    sizes = [len(turn.query_ids) + len(turn.answer_ids) for turn in past]
    length = len(question) + sum(sizes)
    dropped = 0
    while dropped < len(past) and length > space:
        length -= sizes[dropped] - (begin if not dropped else 0)
        dropped += 1
    return dropped


def joined(past: list[Turn]) -> list[int]:
    return [id for turn in past for id in turn.query_ids + turn.answer_ids]


def _common(one: list[int], other: list[int]) -> int:
    if one == other:
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _cut(chosen: Answer, rejected: Answer, space: int) -> tuple[Answer, Answer]:
    """The longer answer's end goes first, then the ends of both."""
    half = space // 2
    of_chosen = max(half, space - len(rejected.ids))
    return chosen.cut(of_chosen), rejected.cut(space - min(of_chosen, len(chosen.ids)))


def lay_out(
    prompt: list[int], chosen: Answer, rejected: Answer, delta: float, tokenizer: Tokenizer, compat: bool
) -> PairSample:
    """prompt without its last token | that token, chosen[:-1] | that token again, rejected[:-1].

    So each scored token has a place of its own that predicts it: labels are one row. ERNIEKit's row is
    prompt | chosen | rejected; there the rejected answer's first token is predicted after the chosen answer's end.
    """
    if compat:
        ids, shared = prompt + chosen.ids + rejected.ids, len(prompt)
        ignored, after = [IGNORE] * (len(prompt) - 1), [IGNORE]
    else:
        ids = prompt + chosen.ids[:-1] + prompt[-1:] + rejected.ids[:-1]
        shared = len(prompt) - 1
        ignored, after = [IGNORE] * shared, []
    # The target at the end of an answer is eos (assemble.py); ERNIEKit scores the end token here.
    end, eos = tokenizer.end_id, tokenizer.end_id if compat else tokenizer.eos_id
    labels = [
        (eos if id == end else id) if scored else IGNORE
        for answer in (chosen, rejected)
        for id, scored in zip(answer.ids, answer.scored)
    ]
    return PairSample(
        np.array(ids, dtype=np.int32),
        np.array(ignored + labels + after, dtype=np.int32),
        shared,
        shared + len(chosen.ids),
        shared + len(chosen.ids) - compat,
        delta,
    )
