"""Streaming detokenizer: tokens to text, whole characters only; stop strings are found before they are shown.

Used by text_engine.py (Python, evaluation tasks), running_request.py and request_parsing.py (the server).
"""

from __future__ import annotations

from collections.abc import Sequence

from erniekit.data.tokenizer import Tokenizer


class Detokenizer:
    """The text of ids that arrive one by one: the pieces add up to what the tokenizer makes of all of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self._printable: list[int] = []  # without control tokens, which have no text
        # Text is decoded from `_start` on, and only what follows the part up to `_done` is new: one token's text
        # may depend on the one before it (spaces, bytes of one character), never on far ones.
        self._start = self._done = 0

    def add(self, *ids: int) -> str:
        """What these ids add; empty while the first bytes of a character wait for the rest."""
        self.ids += ids
        known = len(self._printable)
        self._printable += [id for id in ids if not self.tokenizer.is_special(id)]
        return self._new(whole=True) if len(self._printable) > known else ""

    def rest(self) -> str:
        """What still waits, at the end."""
        return self._new(whole=False)

    def _new(self, whole: bool) -> str:
        before = self.tokenizer.decode(self._printable[self._start : self._done])
        now = self.tokenizer.decode(self._printable[self._start :])
        if whole and now.endswith("\ufffd"):
            return ""
        if len(now) > len(before):
            # A window must begin with text: many tokenizers drop a blank at the start of whatever they decode, and
            # behind an id without text that blank would be one between two words.
            self._start = self._done
        self._done = len(self._printable)
        return now[len(before) :]


class StopStrings:
    """Text with what might be the start of a stop string held back until it is decided."""

    def __init__(self, strings: Sequence[str], keep: bool = False) -> None:
        """keep: the one that is found is shown too."""
        self.keep = keep
        self.strings = tuple(string for string in strings if string)
        self.hit: str | None = None
        self._held = ""

    def add(self, text: str, last: bool = False) -> str:
        """What may be shown now; nothing comes after a hit."""
        if self.hit is not None:
            return ""
        self._held += text
        found = [(at, string) for string in self.strings if (at := self._held.find(string)) >= 0]
        if found:
            at, self.hit = min(found)
            return self._held[: at + len(self.hit)] if self.keep else self._held[:at]
        keep = 0 if last else partial_match(self._held, self.strings)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown


class TextEnd:
    """Whether a text that is read token by token has come to one of its stop strings."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self._detokenizer, self._stop = Detokenizer(tokenizer), StopStrings(strings)

    def __call__(self, id: int) -> bool:
        self._stop.add(self._detokenizer.add(id))
        return self._stop.hit is not None


def partial_match(text: str, strings: Sequence[str]) -> int:
    """How many of the last characters may yet become one of `strings`."""
    longest = max(map(len, strings), default=1) - 1
    for n in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-n:]) for string in strings):
            return n
    return 0
