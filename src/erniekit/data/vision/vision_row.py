"""A row as messages and media. Content is text with marks in it: where a medium is, and where ERNIEKit's rows
divide one text from the next (its tokens depend on that).

Filled by rows.py and chat_rows.py, rendered by template.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from erniekit.data.formats.fields import BadRow
from erniekit.data.media.place import MediaPlace
from erniekit.data.types import ChatMessage

# Noncharacters: no text may hold them, and no tokenizer or template changes them.
_OPEN, _CLOSE, BOUND, UNTRAINED = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"  # the last opens a text that has label 0
_MARK = re.compile(f"{_OPEN}(\\d+){_CLOSE}")


@dataclass(frozen=True)
class GivenMedium:
    """A picture, a video file, or frames of a video, as a row names it."""

    sources: tuple[MediaPlace, ...]
    video: bool = False
    stamps: tuple[float, ...] = ()  # of frames given as pictures
    frames: tuple[int, ...] = ()  # the row sets which
    declared: tuple[int, int] | None = None  # width and height that the row claims; ERNIEKit relies on it


@dataclass(frozen=True)
class VisionRow:
    messages: tuple[ChatMessage, ...]
    media: tuple[GivenMedium, ...]
    unused: tuple[str, ...] = ()
    all_trained: bool = False  # whatever the template has: ERNIEKit's rows with video
    reasoning: bool | None = None  # some answer does, where the messages do not show it
    prefix: str = ""  # put before the last answer, the only one trained then


def mark(number: int) -> str:
    return f"{_OPEN}{number}{_CLOSE}"


def refuse_marks(text: str, field: str) -> str:
    if any(c in text for c in (_OPEN, _CLOSE, BOUND, UNTRAINED)):
        raise BadRow("bad_text", f"`{field}` holds Unicode noncharacters (U+FDD0 to U+FDD3)")
    return text


def parts(content: str) -> list[str | int]:
    """Texts, and the numbers of media between them; empty texts left out."""
    out: list[str | int] = []
    for i, piece in enumerate(_MARK.split(content)):
        if i % 2:
            out.append(int(piece))
        elif piece:
            out.append(piece)
    return out


def media_in(message: ChatMessage) -> list[int]:
    return [int(number) for number in _MARK.findall(message.content)]
