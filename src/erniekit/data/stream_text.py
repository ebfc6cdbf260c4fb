"""Text for pre-training that is read while a run trains: documents end to end, as rows of max_seq_len tokens.

recipes/streaming_text.py builds them. Without shuffling the rows are those of documents.py, whatever has been read so
far; with it, documents are shuffled within blocks and rows follow each other.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import numpy as np

from erniekit.data import cache_versions
from erniekit.data.chunks import Arrays, Chunk
from erniekit.data.documents import DocumentPiece, DocumentRows
from erniekit.data.formats.files import RowPlace
from erniekit.data.pack import Members
from erniekit.data.pretrain import Blend, RowStream
from erniekit.data.row_workers import Rows
from erniekit.data.storage import as_place, is_remote
from erniekit.data.stream_source import StreamSource
from erniekit.data.stream_store import ENDS, IDS
from erniekit.data.text_job import TextJob
from erniekit.data.text_rows import Place, documents
from erniekit.data.tokenise import TokeniseJob
from erniekit.data.types import Sample
from erniekit.errors import DataError
from erniekit.printable import counted

_BLOCKS_KEPT = 4
_IN_ORDER = 4096  # documents looked up at once where they are not shuffled


@dataclass(frozen=True)
class StreamTextJob(TokeniseJob):
    """A document is a sample."""

    json_key: str = "text"

    @classmethod
    def of(cls, path: str, tokenizer: Any, json_key: str) -> StreamTextJob:
        return cls(path, "text", tokenizer, 0, "truncate", False, json_key=json_key)

    def rows(self, after: RowPlace | None = None) -> Iterator[tuple[int, Any, RowPlace | None]]:
        if self._is_remote:
            if self.path.split("?")[0].lower().removesuffix(".gz").endswith(".txt"):
                raise DataError(
                    "a .txt is divided into documents from a file of this machine",
                    where=self.path,
                    fix="copy it here, or give it as .jsonl with `text`",
                )
            yield from super().rows(after)
            return
        begin = Place() if after is None else Place(0, *after)
        for found in documents(Path(self.path), begin):
            yield found.row, found.raw, RowPlace(found.after.offset, found.after.row)

    def can_go_on(self, after: RowPlace) -> bool:
        return super().can_go_on(after) if self._is_remote else True  # documents() finds its places itself

    @property
    def _is_remote(self) -> bool:
        return is_remote(as_place(self.path))

    def work(self, batch: Rows) -> Chunk:
        made = TextJob(self.tokenizer, self.json_key).work(batch)
        ids = np.frombuffer(made.tokens, np.int32)
        bounds = np.concatenate([[0], np.cumsum(made.sizes, dtype=np.int64)])
        lengths = np.diff(bounds[np.concatenate([[0], np.cumsum(made.sequences, dtype=np.int64)])])
        none = Arrays.join([])
        # Every token is trained, as the next of the one before it: no labels of their own.
        main = Arrays(ids, ids, lengths.astype(np.int32), np.zeros(len(lengths), np.int64), none.parts)
        return Chunk(made.rows, main, none, bad=made.bad)

    def key(self, content: str) -> str:
        """Of a content and what turns it into documents."""
        told = [content, self.tokenizer.fingerprint, self.json_key, "streamed documents", cache_versions.DOCUMENTS]
        return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


class TextStream(StreamSource):
    """Documents of an entry, and the rows they make: what the loader asks for are samples of rows."""

    rows: StreamRows

    def sample(self, index: int) -> Sample:
        return self.rows.sample(index)

    def end_of(self, document: int) -> int:
        """Tokens up to the end of a document that has been read; 0 before the first."""
        return 0 if document < 0 else int(self._store.read(ENDS, np.int64, document, 1)[0])

    def ends(self, first: int, count: int) -> np.ndarray:
        return self._store.read(ENDS, np.int64, first, count)

    def tokens(self, start: int, count: int) -> np.ndarray:
        return self._store.read(IDS, np.int32, start, count)

    def document_at(self, token: int) -> int:
        """Which document a token that has been read is of."""
        return bisect_right(_Ends(self), token)


class _Ends(Sequence[int]):
    """Ends of documents as a sequence to search: a few are looked up, none is kept."""

    def __init__(self, source: TextStream) -> None:
        self._source, self._count = source, len(source)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, document: Any) -> Any:
        return self._source.end_of(document)


class DocumentBlock(NamedTuple):
    """Consecutive documents in the order of a pass; others before and behind them do not change their place."""

    bounds: np.ndarray  # int64 [documents + 1]: tokens of the pass before each
    starts: np.ndarray  # int64 [documents]: where each begins in the store


class StreamRows(DocumentRows):
    """Rows of documents that are still being read. An epoch is known by its number alone."""

    def __init__(
        self,
        source: TextStream,
        max_seq_len: int,
        *,
        seed: int,
        number: int,
        shuffle: bool,
        masked: bool,
        block: int,
        vocab_size: int | None,
    ) -> None:
        """block: documents that are shuffled together."""
        self.source, self.max_seq_len = source, max_seq_len
        self.seed, self.number, self.shuffle, self.masked = seed, number, shuffle, masked
        self.vocab_size, self.block = vocab_size, block if shuffle else _IN_ORDER
        self._blocks: OrderedDict[tuple[int, int], DocumentBlock] = OrderedDict()
        self._lock = RLock()
        source.rows = self

    def read_for(self, row: int) -> None:
        """Read on until the row can be made."""
        begin, end, number = self._span(row)  # type: ignore[misc]
        for _ in self._pieces(number, begin, end + 1):
            pass

    def _span(self, row: int) -> Any:  # the epoch is its number
        number, place = 0, row
        if not self.source.require_tokens(row * self.max_seq_len + 2):  # an input, and what follows it
            size = self.source.read_tokens
            rows = max(0, ceil((size - 1) / self.max_seq_len))
            if not rows:
                raise DataError(
                    f"no row of text: {counted(len(self.source), 'document')} with {counted(size, 'token')}",
                    where=self.source.name,
                    fix="give more text",
                )
            number, place = divmod(row, rows)
        begin = place * self.max_seq_len
        whole = self.source.require_tokens(begin + self.max_seq_len + 1)
        return begin, begin + self.max_seq_len if whole else self.source.read_tokens - 1, number

    def _pieces(self, epoch: Any, begin: int, end: int) -> Iterator[DocumentPiece]:
        while begin < end:
            block = self._block(epoch, self.source.document_at(begin) // self.block)
            bounds = block.bounds
            at = int(np.searchsorted(bounds, begin, "right")) - 1
            while at < len(block.starts) and begin < end:
                size = min(end, int(bounds[at + 1])) - begin
                start = int(block.starts[at]) + begin - int(bounds[at])
                if size:
                    yield DocumentPiece(start, size, begin + size < int(bounds[at + 1]))
                begin, at = begin + size, at + 1

    def _block(self, epoch: int, number: int) -> DocumentBlock:
        epoch = epoch if self.shuffle else 0  # file order is the same in each
        with self._lock:
            if (epoch, number) in self._blocks:
                self._blocks.move_to_end((epoch, number))
                return self._blocks[epoch, number]
        first = number * self.block
        # Shuffled, all of its documents must be there; in their order those that are there already will do.
        whole = self.source.require(first + self.block) if self.shuffle else len(self.source) >= first + self.block
        count = self.block if whole else len(self.source) - first
        made = self._made(epoch, number, first, count)
        if whole or (self.source.size is not None and first + count == self.source.size):
            with self._lock:
                self._blocks[epoch, number] = made
                while len(self._blocks) > _BLOCKS_KEPT:
                    self._blocks.popitem(last=False)
        return made

    def _made(self, epoch: int, number: int, first: int, count: int) -> DocumentBlock:
        before = self.source.end_of(first - 1)
        ends = self.source.ends(first, count)
        starts = np.concatenate([[before], ends[:-1]])
        lengths = ends - starts
        if self.shuffle:
            seed = np.frombuffer(self._digest(epoch, f"block {number}"), np.uint32)
            order = np.random.RandomState(seed).permutation(count)
            starts, lengths = starts[order], lengths[order]
        return DocumentBlock(before + np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), starts)

    def _read(self, start: int, count: int) -> np.ndarray:
        read = self.source.tokens(start, count)
        if self.vocab_size is not None and len(read) and int(read.max()) >= self.vocab_size:
            raise DataError(
                f"token {int(read.max())} is not in the model's vocabulary of {self.vocab_size:,}",
                where=self.source.name,
                fix="train with this model's own tokenizer",
            )
        return read


class StreamRowStream(RowStream):
    """Rows of a run over sources that are still being read. Asked for one row, it reads as far as the whole step
    needs: ranks that do not read themselves wait for the others' rows of the same step."""

    def __init__(self, shares: Sequence[Fraction], sources: Sequence[StreamRows], per_step: int, steps: int) -> None:
        super().__init__(Blend(shares), sources, per_step * steps, None)
        self._per_step, self._rows = per_step, sources
        self._read = 0  # rows of the run, whole steps
        self._growing = RLock()

    def __getitem__(self, number: int) -> Members:
        first = number - number % self._per_step
        last = first + self._per_step
        if self._read < last:
            with self._growing:
                for position in range(max(self._read, first), last):  # rows of a source never fall: those before are in
                    source, row = self.blend[position]
                    self._rows[source].read_for(row)
                self._read = max(self._read, last)
        return super().__getitem__(number)

    def count_packs(self, epochs: float = 1) -> int:
        """Those of the run: how many an epoch has is not known."""
        return self.rows
