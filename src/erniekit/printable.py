"""Text of files, rows and strangers as a terminal may show it: errors, log lines and bad rows pass through here."""

from __future__ import annotations

import re
import struct

LONGEST_LINE = 1000  # characters of a message
# What a terminal takes for an order, what ends a line, what turns the reading direction, and halves of characters.
_UNPRINTED = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_ORDERS = re.compile("(?![\n\t])" + _UNPRINTED.pattern)
_COLOUR = re.compile("(\x1b\\[[0-9;]*m)")

_LONGEST_MESSAGE = 160
# Messages of these errors are about the code, not about what is wrong with a file.
_OF_CODE = (TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, NameError, struct.error)
_MEMBER = re.compile(r"<\w+ filename='([^']*)'[^>]*>")
_CODE = re.compile(r"<|>|\b0x[0-9a-fA-F]+|\w\.[A-Za-z_]|\w_\w|\w\(\)")


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


def counted(number: int, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def words_of(error: BaseException) -> str:
    """The readable message of a library's error, without classes, addresses or objects of its code, so that the same
    fault reads the same each time. Empty where nothing else is left."""
    if isinstance(error, _OF_CODE):
        return ""
    message = (getattr(error, "strerror", None) or str(error)).strip()
    message = _MEMBER.sub(r"'\1'", message.splitlines()[0]) if message else ""
    return "" if _CODE.search(message) else plain(message, _LONGEST_MESSAGE)


def fault_of(error: BaseException) -> str:
    """Of our own code, for a report: the same each time it is met."""
    return plain(re.sub(r" at 0x[0-9a-fA-F]+", "", f"a fault of erniekit: {type(error).__name__}: {error}"))


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
