"""One conversation to one training sample: which turns fit, what is input, what is trained.

Called by the token cache's workers. The rules are ERNIEKit's (SFT reader); `compat` keeps its one fault as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from erniekit.data.template import TemplateRefused, ThoughtRefused, Turn, turns
from erniekit.data.thinking import Thinking, has_thought, kept
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import IGNORE, Conversation, Sample
from erniekit.printable import counted

# ERNIEKit reserves these tokens per turn, and one per conversation; both are part of what it drops.
TURN_RESERVE = 8
DIALOG_RESERVE = 1


@dataclass(frozen=True)
class Assembled:
    sample: Sample
    dropped_turns: int = 0  # older turns left out for length
    truncated_tokens: int = 0
    rewritten_turns: int = 0  # older answers not trained because the template renders them otherwise than when new
    thoughts: int = 0  # answers of the row with reasoning
    thoughts_in: int = 0  # of them, those whose thought is in the sample
    thought_tokens: int = 0


@dataclass(frozen=True)
class Dropped:
    """`kind` is what reports count by: overlong, too_short, untrained, template, thought."""

    kind: str
    reason: str

    @classmethod
    def by_template(cls, refused: TemplateRefused) -> Dropped:
        return cls("thought" if isinstance(refused, ThoughtRefused) else "template", str(refused))


def assemble(
    conversation: Conversation,
    tokenizer: Tokenizer,
    max_seq_len: int,
    overlong: Literal["drop", "truncate"] = "drop",
    compat: bool = False,
    thinking: Thinking = "all",
    known: list[Turn] | None = None,
) -> Assembled | Dropped:
    """known: the conversation's turns, where they are rendered already."""
    try:
        all_turns = known or turns(replace(conversation, messages=kept(conversation.messages, thinking)), tokenizer)
    except TemplateRefused as refused:
        return Dropped.by_template(refused)
    if not all_turns:
        return Dropped("untrained", "the conversation has no assistant message")
    fitting = _newest_that_fit(all_turns, max_seq_len)
    dropped = len(all_turns) - len(fitting)
    cut = 0
    if not fitting and overlong == "truncate":
        fitting, cut = _cut_answer(all_turns[-1], max_seq_len)
        dropped = len(all_turns) - 1
    if not fitting:
        return _too_long(all_turns[-1], max_seq_len, overlong)
    count = sum(len(turn.query_ids) + len(turn.answer_ids) for turn in fitting)
    if count <= DIALOG_RESERVE + TURN_RESERVE:
        return Dropped("too_short", f"only {counted(count, 'token')}; {DIALOG_RESERVE + TURN_RESERVE + 1} are needed")
    begins = all_turns[0].query_ids[:1] == [tokenizer.begin_id]
    sample = _label(fitting, tokenizer, begins, not cut, compat, thinking == "mask")
    if not (sample.labels != IGNORE).any():
        return Dropped("untrained", _why_untrained(all_turns, dropped, thinking))
    wanted = sum(m.role == "assistant" and m.trained for m in conversation.messages)
    return Assembled(
        sample,
        dropped,
        cut,
        rewritten_turns=max(0, wanted - sum(turn.trained for turn in all_turns)),
        thoughts=sum(map(has_thought, conversation.messages)),
        thoughts_in=sum(turn.thought > 0 for turn in fitting),
        thought_tokens=sum(turn.thought for turn in fitting),
    )


def _newest_that_fit(all_turns: list[Turn], max_seq_len: int) -> list[Turn]:
    """Newest first, whole turns only, until one does not fit."""
    total = 0
    first = len(all_turns)
    for turn in reversed(all_turns):
        length = len(turn.query_ids) + len(turn.answer_ids)
        if length > max_seq_len + 1 - (total or DIALOG_RESERVE) - TURN_RESERVE:
            break
        total += length
        first -= 1
    return all_turns[first:]


def _cut_answer(turn: Turn, max_seq_len: int) -> tuple[list[Turn], int]:
    """The turn with its answer's end cut off; nothing if the query leaves no space for one answer token."""
    space = max_seq_len + 1 - DIALOG_RESERVE - TURN_RESERVE - len(turn.query_ids)
    if space < 1:
        return [], 0
    cut = Turn(turn.query_ids, turn.answer_ids[:space], turn.trained, min(turn.thought, space))
    return [cut], len(turn.answer_ids) - space


def _too_long(turn: Turn, max_seq_len: int, overlong: str) -> Dropped:
    space = max(0, max_seq_len + 1 - DIALOG_RESERVE - TURN_RESERVE)
    query, answer = len(turn.query_ids), len(turn.answer_ids)
    if overlong == "truncate":
        return Dropped("overlong", f"its last question alone has {query} tokens and {space} fit: nothing to train")
    return Dropped("overlong", f"its last turn has {query + answer} tokens ({query} + {answer}) and {space} fit")


def _why_untrained(all_turns: list[Turn], dropped: int, thinking: Thinking) -> str:
    if dropped and any(turn.trained for turn in all_turns):
        return f"no trained turn is left after {counted(dropped, 'older turn was', 'older turns were')} dropped to fit"
    if thinking == "mask" and any(turn.trained for turn in all_turns):
        return "only a thought fits, and train_thinking is mask"
    return "no turn is trained (all labels are 0)"


def _label(
    fitting: list[Turn], tokenizer: Tokenizer, begins: bool, ends: bool, compat: bool, mask_thoughts: bool
) -> Sample:
    """Pre-shifted: labels[i] is the token after ids[i]. The answer and its end token are targets, the rest is not."""
    ids: list[int] = []
    target: list[bool] = []  # whether this token is to be predicted
    if begins and fitting[0].query_ids[0] != tokenizer.begin_id:
        ids.append(tokenizer.begin_id or 0)
        target.append(False)
    for turn in fitting:
        # The old reader's mask ran one position too far: an answer's end token learnt the next user turn's first token.
        leak = compat and bool(target) and target[-1]
        target += [leak] + [False] * (len(turn.query_ids) - 1)
        masked = turn.thought if mask_thoughts else 0
        target += [False] * masked + [turn.trained] * (len(turn.answer_ids) - masked)
        ids += turn.query_ids + turn.answer_ids
    if ends and not tokenizer.is_special(ids[-1]):
        ids.append(tokenizer.eos_id)  # the template closes answers with nothing the model could stop at
        target.append(target[-1])
    # A turn's end token separates turns in the input; the target there is eos.
    end, eos = tokenizer.end_id, tokenizer.eos_id
    labels = [(eos if id == end else id) if trained else IGNORE for id, trained in zip(ids[1:], target[1:])]
    return Sample(np.array(ids[:-1], dtype=np.int32), np.array(labels, dtype=np.int32))
