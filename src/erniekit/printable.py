"""Text of files, rows and strangers as a terminal may show it: errors, log lines and bad rows pass through here."""

from __future__ import annotations

import re

LONGEST_LINE = 1000  # characters of a message
# What a terminal takes for an order, what ends a line, what turns the reading direction, and halves of characters.
_UNPRINTED = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_ORDERS = re.compile("(?![\n\t])" + _UNPRINTED.pattern)
_COLOUR = re.compile("(\x1b\\[[0-9;]*m)")


def plain(text: str, most: int = LONGEST_LINE) -> str:
    """One line: what would not print as escapes, and the middle of a long text left out."""
    text = _UNPRINTED.sub(_escaped, text)
    return text if len(text) <= most else f"{text[: (most - 3) // 2]}...{text[len(text) - (most - 2) // 2 :]}"


def plain_lines(text: str) -> str:
    """As `plain`, of a text whose lines, tabs and colours are ours."""
    if not _ORDERS.search(text):
        return text
    pieces = _COLOUR.split(text)
    return "".join(piece if i % 2 else _ORDERS.sub(_escaped, piece) for i, piece in enumerate(pieces))


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
