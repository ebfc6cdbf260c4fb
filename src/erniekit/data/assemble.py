"""One conversation to one training sample: which turns fit, what is input, what is trained.

Called by the token cache's workers. The rules are ERNIEKit's (SFT reader); `compat` keeps its one fault as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from erniekit.data.template import TemplateRefused, Turn, turns
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import IGNORE, Conversation, Sample

# ERNIEKit keeps this room free per turn, and one token per conversation; both are part of what it drops.
TURN_RESERVE = 8
DIALOG_RESERVE = 1


@dataclass(frozen=True)
class Assembled:
    sample: Sample
    dropped_turns: int = 0  # older turns left out for length, or not trained because the template rewrites them
    truncated_tokens: int = 0


@dataclass(frozen=True)
class Dropped:
    """`kind` is what reports count by: overlong, too_short, untrained, template."""

    kind: str
    reason: str


def assemble(
    conversation: Conversation,
    tokenizer: Tokenizer,
    max_seq_len: int,
    overlong: Literal["drop", "truncate"] = "drop",
    compat: bool = False,
) -> Assembled | Dropped:
    try:
        said = turns(conversation, tokenizer)
    except TemplateRefused as refused:
        return Dropped("template", str(refused))
    if not said:
        return Dropped("untrained", "the conversation has no assistant message")
    kept = _newest_that_fit(said, max_seq_len)
    dropped = len(said) - len(kept)
    cut = 0
    if not kept and overlong == "truncate":
        kept, cut = _cut_answer(said[-1], max_seq_len)
        dropped = len(said) - 1
    if not kept:
        return _too_long(said[-1], max_seq_len, overlong)
    count = sum(len(turn.query_ids) + len(turn.answer_ids) for turn in kept)
    if count <= DIALOG_RESERVE + TURN_RESERVE:
        return Dropped("too_short", f"only {count} tokens; {DIALOG_RESERVE + TURN_RESERVE + 1} are needed")
    begins = said[0].query_ids[:1] == [tokenizer.begin_id]
    sample = _label(kept, tokenizer, begins, ends=not cut, compat=compat)
    if not (sample.labels != IGNORE).any():
        return Dropped("untrained", _why_untrained(said, dropped))
    wanted = sum(m.role == "assistant" and m.trained for m in conversation.messages)
    dropped += max(0, wanted - sum(turn.trained for turn in said))
    return Assembled(sample, dropped, cut)


def _newest_that_fit(said: list[Turn], max_seq_len: int) -> list[Turn]:
    """Newest first, whole turns only, until one does not fit."""
    total = 0
    first = len(said)
    for turn in reversed(said):
        length = len(turn.query_ids) + len(turn.answer_ids)
        if length > max_seq_len + 1 - (total or DIALOG_RESERVE) - TURN_RESERVE:
            break
        total += length
        first -= 1
    return said[first:]


def _cut_answer(turn: Turn, max_seq_len: int) -> tuple[list[Turn], int]:
    """The turn with its answer's end cut off; nothing if the query leaves no room for one answer token."""
    room = max_seq_len + 1 - DIALOG_RESERVE - TURN_RESERVE - len(turn.query_ids)
    if room < 1:
        return [], 0
    return [Turn(turn.query_ids, turn.answer_ids[:room], turn.trained)], len(turn.answer_ids) - room


def _too_long(turn: Turn, max_seq_len: int, overlong: str) -> Dropped:
    room = max_seq_len + 1 - DIALOG_RESERVE - TURN_RESERVE
    query, answer = len(turn.query_ids), len(turn.answer_ids)
    if overlong == "truncate":
        return Dropped("overlong", f"its last question alone has {query} tokens and {room} fit: nothing to train")
    return Dropped("overlong", f"its last turn has {query + answer} tokens ({query} + {answer}) and {room} fit")


def _why_untrained(said: list[Turn], dropped: int) -> str:
    if dropped and any(turn.trained for turn in said):
        return f"no trained turn is left after {dropped} older turns were dropped to fit"
    return "no turn is trained (all labels are 0)"


def _label(kept: list[Turn], tokenizer: Tokenizer, begins: bool, ends: bool, compat: bool) -> Sample:
    """Pre-shifted: labels[i] is the token after ids[i]. The answer and its end token are targets, the rest is not."""
    ids: list[int] = []
    target: list[bool] = []  # whether this token is to be predicted
    if begins and kept[0].query_ids[0] != tokenizer.begin_id:
        ids.append(tokenizer.begin_id or 0)
        target.append(False)
    for turn in kept:
        # The old reader's mask ran one position too far: an answer's end token learnt the next user turn's first token.
        leak = compat and bool(target) and target[-1]
        target += [leak] + [False] * (len(turn.query_ids) - 1) + [turn.trained] * len(turn.answer_ids)
        ids += turn.query_ids + turn.answer_ids
    if ends and not tokenizer.is_special(ids[-1]):
        ids.append(tokenizer.eos_id)  # the template closes answers with nothing the model could stop at
        target.append(target[-1])
    # A turn's end token separates turns in the input; what the model learns to say there is eos.
    end, eos = tokenizer.end_id, tokenizer.eos_id
    labels = [(eos if id == end else id) if trained else IGNORE for id, trained in zip(ids[1:], target[1:])]
    return Sample(np.array(ids[:-1], dtype=np.int32), np.array(labels, dtype=np.int32))
