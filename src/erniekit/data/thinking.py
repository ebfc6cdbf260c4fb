"""Thoughts in front of answers: which of them a row keeps, how they are written down, which tokens they are.

Used by the formats (field names), template.py (rendering) and assemble.py (labels). The tags are those that
serve/output_parser.py takes apart, so a served answer divides where a trained one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal

from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import ChatMessage

THINK, THOUGHT = "<think>", "</think>"
# Names of a thought besides `content` in chat programs, under which templates read it.
FIELDS = ("reasoning_content", "reasoning", "thinking")

# all: rendered and trained; last: only the last answer's; mask: rendered, not trained; drop: left out.
Thinking = Literal["all", "last", "mask", "drop"]


def divided(content: str) -> tuple[str, str]:
    """The thought that `content` opens with between its tags, and what comes after; an empty thought if none."""
    if THOUGHT not in content:
        return "", content
    inside, _, answer = content.lstrip().partition(THOUGHT)
    if not inside.startswith(THINK):
        return "", content
    return inside[len(THINK) :].strip(), answer.lstrip()


def kept(messages: Sequence[ChatMessage], rule: Thinking) -> tuple[ChatMessage, ...]:
    """Without the thoughts that the rule leaves out, whether they are fields of their own or open the content."""
    if rule in ("all", "mask"):
        return tuple(messages)
    last = max((i for i, m in enumerate(messages) if m.role == "assistant"), default=-1)
    spared = last if rule == "last" else -1
    return tuple(m if i == spared or m.role != "assistant" else without(m) for i, m in enumerate(messages))


def without(message: ChatMessage) -> ChatMessage:
    _, answer = divided(message.content)
    return replace(message, content=answer, thought="") if message.thought or answer != message.content else message


def has_thought(message: ChatMessage) -> bool:
    return message.role == "assistant" and bool(message.thought or divided(message.content)[0])


def write_out(message: ChatMessage) -> ChatMessage:
    """For templates that know no thoughts: the answer with its thought between tags in front."""
    if not message.thought:
        return message
    block = f"{THINK}\n{message.thought.strip()}\n{THOUGHT}\n"
    return replace(message, content=f"{block}\n{message.content}" if message.content else block)


def thought_tokens(query: str, answer: str, ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """How many of the answer's ids are its thought, closing tag included. The prompt may have opened it."""
    opened = query.rstrip().endswith(THINK)
    if THOUGHT not in answer or not (opened or answer.lstrip().startswith(THINK)):
        return 0
    pieces = tokenizer.pieces(ids)
    at = "".join(pieces).find(THOUGHT)
    if at < 0:  # a vocabulary that cannot spell the tag
        return min(len(ids), len(tokenizer.encode_text(answer[: answer.index(THOUGHT) + len(THOUGHT)])))
    sizes = accumulate(map(len, pieces))
    return 1 + next(i for i, size in enumerate(sizes) if size >= at + len(THOUGHT))
