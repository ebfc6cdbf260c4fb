"""Job log: the end of a log as plain text, read from where the last reading ended. Used by jobs.py and preview.py."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

from erniekit.printable import public

TAIL_BYTES = 64 * 1024  # of a log, at most, in one answer
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class LogPart:
    text: str
    offset: int  # where the next part starts

    @property
    def html(self) -> str:
        return escape(self.text)


def read_log(path: Path, after: int = -1) -> LogPart:
    """The log from offset `after` on; -1, or more than TAIL_BYTES behind, gives its end."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = after if max(0, size - TAIL_BYTES) <= after <= size else max(0, size - TAIL_BYTES)
            file.seek(start)
            raw = file.read(TAIL_BYTES)
            if start and start != after:  # an address whose beginning is cut off could not be recognised as one
                begin = max(0, raw.find(b"\n"))
                raw, start = raw[begin:], start + begin
    except FileNotFoundError:
        return LogPart("", 0)
    raw = raw[: len(raw) - _unfinished(raw)]
    return LogPart(public(plain(raw.decode("utf-8", errors="replace"))), start + len(raw))


def plain(text: str) -> str:
    """Terminal text as lines: no colours, and of a line that was drawn over and over the last state."""
    text = _ANSI.sub("", text).replace("\r\n", "\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def _unfinished(raw: bytes) -> int:
    """Bytes at the end that start a character whose rest is not written yet."""
    for back in range(1, min(4, len(raw)) + 1):
        byte = raw[-back]
        if byte >= 0xC0:
            return back if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else 0
        if byte < 0x80:
            return 0
    return 0
