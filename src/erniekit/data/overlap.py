"""Rows that share a run of words with evaluation rows. Used by `erniekit data clean --against`.

Words are compared without case and punctuation; a Chinese or Japanese character is a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from erniekit.data.quality import Read

# A single ideograph or kana, or a run of other letters and digits.
_ALONE = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_ALONE}]|[^\W_{_ALONE}]+")
SHORTEST = 4  # words of an evaluation text; fewer do not show where a row comes from


class OverlapIndex:
    """The word n-grams of evaluation rows; a text of fewer than n words is one gram of its own length."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._grams: dict[int, dict[tuple[str, ...], str]] = {}  # length -> gram -> where it was first met

    def add(self, read: Read, where: str) -> None:
        for text in texts_of(read):
            words = words_of(text)
            size = min(self.size, len(words))
            if size >= SHORTEST:
                grams = self._grams.setdefault(size, {})
                for gram in _grams(words, size):
                    grams.setdefault(gram, where)

    def find(self, read: Read) -> tuple[str, str] | None:
        """The words a row shares, and the evaluation row that has them."""
        for text in texts_of(read):
            words = words_of(text)
            for size, grams in self._grams.items():
                for gram in _grams(words, size):
                    if gram in grams:
                        return " ".join(gram), grams[gram]
        return None


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _grams(words: list[str], size: int) -> Iterator[tuple[str, ...]]:
    return (tuple(words[i : i + size]) for i in range(len(words) - size + 1))


def texts_of(read: Read) -> list[str]:
    """Texts of users and assistant; system texts are the same in many rows that have nothing to do with each
    other."""
    return [m.content for part in read[-1].contents().parts for m in part if m.role != "system"]
