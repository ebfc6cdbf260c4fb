"""Rows of a text and its class, for stage CLS: which classes a file has, and its rows as samples with one label.

recipes/classify.py opens them through token_cache.open_source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.data.assemble import Assembled, Dropped
from erniekit.data.formats import CLASS_FORMATS, parsed, reader_of, rows, sole_format
from erniekit.data.formats.columns import Columns
from erniekit.data.formats.fields import BadRow, named, refuse_media, require, row_named, text, unread
from erniekit.data.template import Turn
from erniekit.data.token_cache import RowKind, TokenSource
from erniekit.data.tokenise import TokeniseJob
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import IGNORE, ChatMessage, RowContent, RowProblem, Sample
from erniekit.errors import DataError
from erniekit.registry import Registry

MOST = 1000  # classes of a file; more are texts in the wrong field


@dataclass(frozen=True)
class ClassRow:
    text: str
    label: str
    unused: tuple[str, ...] = ()

    def contents(self) -> RowContent:
        return RowContent(((ChatMessage("user", self.text),),), label=self.label)


def read_row(row: Any) -> ClassRow:
    if not isinstance(row, dict):
        raise BadRow("not_an_object", f"a row must be an object with `text` and `label`, not {row_named(row)}")
    refuse_media(row)
    if row.get("text") is None and row.get("messages") is not None:
        raise BadRow("missing_field", "the row has `messages`; stage CLS reads plain text: write it as `text`")
    require(row, "text", "label")
    return ClassRow(text(row["text"], "text"), class_name(row["label"]), tuple(unread(row, ("text", "label"))))


def class_name(value: Any) -> str:
    if isinstance(value, str) and value.strip():
        return text(value, "label").strip()
    if isinstance(value, (bool, int)):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, float) and value.is_integer():  # as tables hold whole numbers
        return str(int(value))
    found = f"{value:g}" if isinstance(value, float) else named(value)
    raise BadRow("bad_label", f"`label` must be a class: a name or a whole number, not {found}")


def classes_in(
    files: Sequence[str | Path], columns: Columns = (), formats: Sequence[str | None] = ()
) -> tuple[str, ...]:
    """Of all rows that can be read, whole numbers by size, names by the alphabet. formats: one a file, or none."""
    found: set[str] = set()
    for file, format in zip(files, formats or [None] * len(files)):
        read = reader_of(CLASS_FORMATS, sole_format(CLASS_FORMATS, format), ClassRow)
        for line, raw in rows(file):
            row = parsed(raw, line, file, read, columns)
            if isinstance(row, ClassRow):
                found.add(row.label)
            if len(found) > MOST:
                raise DataError(
                    f"more than {MOST:,} classes, the last is {row.label[:60]!r}" if isinstance(row, ClassRow) else "",
                    where=f"{file}:{line}",
                    fix="`label` is the class of a row, not its text; class_labels names the classes",
                )
    if all(name.lstrip("-").isdecimal() for name in found):
        return tuple(sorted(found, key=int))
    return tuple(sorted(found))


@dataclass(frozen=True)
class ClassifyJob(TokeniseJob):
    classes: tuple[str, ...] = ()

    def more_key(self) -> dict[str, Any]:
        return {"rows": "classes", "classes": self.classes}

    @property
    def formats(self) -> Registry:
        return CLASS_FORMATS

    def read(self, raw: Any, line: int) -> Sequence[ClassRow] | RowProblem:
        def one(row: Any) -> list[ClassRow]:
            made: ClassRow = reader_of(CLASS_FORMATS, self.format, ClassRow)(row)
            if made.label not in self.classes:
                known = ", ".join(self.classes[:8]) + (" ..." if len(self.classes) > 8 else "")
                raise BadRow("unknown_class", f"`label` is {made.label[:60]!r}; the classes are {known}")
            return [made]

        return parsed(raw, line, self.path, one, self.columns)

    def assemble(self, said: ClassRow, known: list[Turn] | None = None) -> Assembled | Dropped:
        ids = text_ids(self.tokenizer, said.text)
        cut = len(ids) - self.max_seq_len
        if cut > 0 and self.overlong == "drop":
            return Dropped("overlong", f"its text has {len(ids)} tokens and {self.max_seq_len} fit")
        ids = ids[: self.max_seq_len]
        labels = np.full(len(ids), IGNORE, np.int32)
        labels[-1] = self.classes.index(said.label)
        return Assembled(Sample(np.array(ids, np.int32), labels), truncated_tokens=max(0, cut))


def class_rows(classes: tuple[str, ...]) -> Callable[[Any, str | None, Columns], RowKind]:
    def kind(path: Any, format: str | None, columns: Columns = ()) -> RowKind:
        """format: a package's; other rows have one reader."""
        return RowKind(sole_format(CLASS_FORMATS, format), partial(ClassifyJob, classes=classes), TokenSource)

    return kind


def text_ids(tokenizer: Tokenizer, words: str) -> list[int]:
    """The tokenizer's begin token, where it has one, and the text."""
    begin = [] if tokenizer.begin_id is None else [tokenizer.begin_id]
    return begin + tokenizer.encode_text(words)
