"""Rows of text -> tokens: what one worker process of indexing does. index.py and its workers call it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from erniekit.data.chunks import RefusedLine
from erniekit.data.formats.fields import BadRow, require, row_named, text, texts
from erniekit.data.formats.files import decode
from erniekit.data.formats.tables import NOT_UTF8
from erniekit.data.text_rows import PlainText
from erniekit.data.tokenise import Rows
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import RowProblem

UNUSABLE = (ValueError, RecursionError)  # what `TextJob.texts` raises of a row


def problem_of(error: Exception) -> tuple[str, str]:
    """Kind and reason of a row that `texts` cannot read."""
    if isinstance(error, BadRow):
        return error.kind, error.reason
    if isinstance(error, UnicodeDecodeError):
        return NOT_UTF8, f"byte {error.start + 1} is not UTF-8"
    return "bad_json", f"not usable as JSON: {error}"


@dataclass(frozen=True)
class TextJob:
    """What decides a document's tokens, besides the document."""

    tokenizer: Tokenizer
    json_key: str = "text"
    append_eos: bool = True
    dtype: str = "int32"

    def work(self, batch: Rows) -> TextChunk:
        """A text is a sequence; the texts of one row are a document, which eos closes."""
        ids: list[int] = []
        sizes: list[int] = []
        sequences: list[int] = []
        bad: list[RefusedLine] = []
        for line, raw in batch:
            if isinstance(raw, RowProblem):
                bad.append((line, raw.kind, raw.reason))
                continue
            try:
                encoded = [self.tokenizer.encode_text(said) for said in self.texts(raw)]
            except UNUSABLE as error:
                bad.append((line, *problem_of(error)))
            else:
                if self.append_eos:
                    encoded[-1].append(self.tokenizer.eos_id)
                for sequence in encoded:
                    ids += sequence
                    sizes.append(len(sequence))
                sequences.append(len(encoded))
        tokens = np.array(ids, self.dtype).tobytes()
        return TextChunk(len(batch), tokens, np.array(sizes, np.int32), np.array(sequences, np.int32), bad)

    def texts(self, raw: Any) -> list[str]:
        """BadRow where the row has none."""
        if isinstance(raw, PlainText):
            return [text(bytes(raw).decode("utf-8"), "text")]
        row = decode(raw)
        if not isinstance(row, dict):
            raise BadRow("not_an_object", f"a row must be an object with `{self.json_key}`, not {row_named(row)}")
        require(row, self.json_key)
        return texts(row[self.json_key], self.json_key)


@dataclass
class TextChunk:
    rows: int
    tokens: bytes
    sizes: np.ndarray  # int32, tokens of each sequence
    sequences: np.ndarray  # int32, sequences of each document
    bad: list[RefusedLine]
