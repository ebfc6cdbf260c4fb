"""Documents as rows of max_seq_len tokens: row j of a data set is a pure function of its files, the seed and j.

pretrain.py blends several of them; the loader reads the samples. What is trained is the next token, every one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from threading import RLock
from typing import NamedTuple

import numpy as np

from erniekit.data import cache_versions, sealed
from erniekit.data.cache_lock import only_one
from erniekit.data.mmap_files import TokenFiles
from erniekit.data.types import IGNORE, Sample
from erniekit.errors import ConfigError, DataError
from erniekit.files.cache_folder import default_cache_dir
from erniekit.files.unwritable import way_out

PARTS = ("train", "eval", "test")
IN_MEMORY = 1 << 20  # documents; the order of more is kept on disk, and only looked up
_EPOCHS_KEPT = 2  # loader threads may be on both sides of an epoch's end
_ROUNDS = 6
_MASK64 = (1 << 64) - 1


def part_of(split: str, count: int, part: str) -> range:
    """The documents of one part: `split` as in "998,1,1", its numbers the shares of train, eval and test."""
    try:
        shares = [float(share) for share in split.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= len(PARTS) or min(shares) < 0 or not sum(shares) > 0 or sum(shares) == float("inf"):
        raise ConfigError(
            f"{split!r} does not divide documents into parts",
            where="split",
            fix='up to three comma-separated shares, of train, eval and test: "998,1,1"',
        )
    shares += [0.0] * (len(PARTS) - len(shares))
    bounds = [round(count * sum(shares[:k]) / sum(shares)) for k in range(len(PARTS) + 1)]
    at = PARTS.index(part)
    return range(bounds[at], bounds[at + 1])


def scatter(place: int, size: int, key: int) -> int:
    """Where `place` of [0, size) goes in a shuffle by `key`. Nothing is stored: a Feistel network on the number's two
    halves is one to one whatever its rounds compute, and what falls outside goes round again."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mixed(right + (key ^ number << 56)) & mask)
        place = left << half | right
        if place < size:
            return place


def _mixed(share: int) -> int:
    """Every bit of a 64-bit word spread over all of them (the finaliser of splitmix64)."""
    share = (share + 0x9E3779B97F4A7C15) & _MASK64
    share = ((share ^ share >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
    share = ((share ^ share >> 27) * 0x94D049BB133111EB) & _MASK64
    return share ^ share >> 31


class Epoch(NamedTuple):
    """The documents of one pass, end to end."""

    order: np.ndarray | None  # which document stands at each place; None: file order
    bounds: np.ndarray  # int64 [documents + 1]: tokens before each place


class DocumentPiece(NamedTuple):
    """Neighbouring tokens of one document; as one integer it is what a stream hands to the loader."""

    start: int  # in the token file
    size: int
    goes_on: bool  # the document has a token after it

    def code(self) -> int:
        return (self.start << 32 | self.size) << 1 | self.goes_on

    @classmethod
    def of(cls, code: int) -> DocumentPiece:
        return cls(code >> 33, code >> 1 & 0xFFFFFFFF, bool(code & 1))


class DocumentRows:
    """Rows of the documents in `part`, epoch after epoch: row j is number j % rows of epoch j // rows.

    Every epoch lays the documents end to end in an order of its own and cuts that every max_seq_len tokens, so that
    each token but the very first is predicted once; the last row may be shorter. The rows are shuffled again, or the
    rows of one long document would follow each other. `masked`: a row is its documents apart, none sees another;
    otherwise it is one text, and a document's end predicts the next one's beginning.
    """

    def __init__(
        self,
        files: TokenFiles,
        part: range,
        max_seq_len: int,
        *,
        seed: int = 0,
        number: int = 0,
        shuffle: bool = True,
        masked: bool = False,
        vocab_size: int | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        self.files, self.part, self.max_seq_len = files, part, max_seq_len
        self.seed, self.number, self.shuffle, self.masked = seed, number, shuffle, masked
        self.vocab_size, self.cache_dir = vocab_size, Path(cache_dir or default_cache_dir())
        first, last = files.starts(np.array([part.start, part.stop])).tolist()
        self.tokens = last - first
        self.rows = max(0, -(-(self.tokens - 1) // max_seq_len))
        self._epochs: OrderedDict[int, Epoch] = OrderedDict()
        self._lock = RLock()

    def members(self, row: int) -> list[int]:
        """What `sample` takes: the row itself, or its documents one by one."""
        if not self.masked:
            return [row]
        begin, end, epoch = self._span(row)
        return [piece.code() for piece in self._pieces(epoch, begin, end)]

    def sample(self, index: int) -> Sample:
        if self.masked:
            piece = DocumentPiece.of(index)
            read = self._read(piece.start, piece.size + piece.goes_on)
            last = np.full(1 - piece.goes_on, IGNORE, np.int32)  # nothing follows a document's end
            return Sample(read[: piece.size], np.concatenate([read[1:], last]))
        begin, end, epoch = self._span(index)
        read = np.concatenate([self._read(p.start, p.size) for p in self._pieces(epoch, begin, end + 1)])
        return Sample(read[:-1], read[1:])

    def _span(self, row: int) -> tuple[int, int, Epoch]:
        """Tokens [begin, end) of an epoch are the row's inputs."""
        number, place = divmod(row, self.rows)
        if self.shuffle:
            place = scatter(place, self.rows, self._key(number))
        begin = place * self.max_seq_len
        return begin, min(begin + self.max_seq_len, self.tokens - 1), self._epoch(number)

    def _pieces(self, epoch: Epoch, begin: int, end: int) -> Iterator[DocumentPiece]:
        bounds = epoch.bounds
        first = int(np.searchsorted(bounds, begin, "right")) - 1
        last = int(np.searchsorted(bounds, end, "left"))
        places = np.arange(first, last) if epoch.order is None else epoch.order[first:last]
        starts = self.files.starts(self.part.start + places.astype(np.int64))
        before = bounds[first : last + 1]
        low, high = np.maximum(before[:-1], begin), np.minimum(before[1:], end)
        pieces = (starts + low - before[:-1], high - low, high < before[1:])
        for start, size, goes_on in zip(*(array.tolist() for array in pieces)):
            if size:
                yield DocumentPiece(start, size, goes_on)

    def _read(self, start: int, count: int) -> np.ndarray:
        read = self.files.tokens(start, count)
        if self.vocab_size is not None and len(read) and not 0 <= read.min() <= read.max() < self.vocab_size:
            worst = int(read.max()) if read.max() >= self.vocab_size else int(read.min())
            raise DataError(
                f"token {worst} is not in the model's vocabulary of {self.vocab_size:,}",
                where=f"{self.files.path}, after {start:,} tokens",
                fix="index the text again with this model's tokenizer",
            )
        return read

    def _key(self, epoch: int) -> int:
        return int.from_bytes(self._digest(epoch)[:8], "little")

    def _digest(self, epoch: int, *more: str) -> bytes:
        pieces = " ".join([f"{self.seed} {self.number} {epoch}", *more])
        return hashlib.blake2b(pieces.encode(), digest_size=16).digest()

    def _epoch(self, number: int) -> Epoch:
        number = number if self.shuffle else 0  # file order is the same in each
        with self._lock:
            if number not in self._epochs:
                many = len(self.part) > IN_MEMORY
                self._epochs[number] = self._kept_epoch(number) if many else self._make_epoch(number)
                while len(self._epochs) > _EPOCHS_KEPT:
                    self._epochs.popitem(last=False)
            self._epochs.move_to_end(number)
            return self._epochs[number]

    def _make_epoch(self, number: int) -> Epoch:
        lengths = self.files.lengths(self.part.start, self.part.stop)
        order = None
        if self.shuffle:
            # NumPy freezes RandomState's streams but not a Generator's; an upgrade must not reorder a resumed run
            random = np.random.RandomState(np.frombuffer(self._digest(number), np.uint32))
            order = random.permutation(len(lengths)).astype(np.int32 if len(lengths) < 2**31 else np.int64)
            lengths = lengths[order]
        bounds = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, dtype=np.int64, out=bounds[1:])
        return Epoch(order, bounds)

    def _kept_epoch(self, number: int) -> Epoch:
        """From disk, by the hash of what decides it; made by whichever rank comes first."""
        part = f"{self.files.fingerprint()} {self.part} {self.shuffle} version {cache_versions.ORDER}"
        folder = self.cache_dir / "orders" / self._digest(number, part).hex()
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with only_one(folder):
                if not sealed.is_sealed(folder):
                    self._keep(self._make_epoch(number), folder)
        except OSError as error:
            raise DataError(
                f"the order of documents cannot be written: {error}",
                where=str(folder),
                fix=f"{way_out(error)}, or set ERNIEKIT_CACHE to a folder on another disk",
            ) from error
        bounds = np.load(folder / "bounds.npy", mmap_mode="r")
        return Epoch(np.load(folder / "order.npy", mmap_mode="r") if self.shuffle else None, bounds)

    def _keep(self, epoch: Epoch, folder: Path) -> None:
        temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        np.save(temporary / "bounds.npy", epoch.bounds)
        if epoch.order is not None:
            np.save(temporary / "order.npy", epoch.order)
        sealed.seal(temporary)
        if folder.exists() and not sealed.is_sealed(folder):  # damaged
            sealed.clear(folder, ("bounds.npy", "order.npy", sealed.SEAL))
        try:
            sealed.publish(temporary, folder)
        except OSError:
            if not sealed.is_sealed(folder):  # not because another machine was first
                raise
            shutil.rmtree(temporary, ignore_errors=True)
