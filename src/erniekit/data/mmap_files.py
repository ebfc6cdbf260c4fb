"""Token files as Megatron and PaddleNLP keep them: PREFIX.bin + PREFIX.idx, or PREFIX_ids.npy + PREFIX_idx.npz.

index.py writes them, documents.py reads them; both by position, so what is resident does not grow with the files.
"""

from __future__ import annotations

import ast
import hashlib
import math
import os
import struct
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from erniekit.data import sealed
from erniekit.errors import DataError
from erniekit.files import refuse_special

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
_HEAD = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, entries of the document index
CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = (6, 7)
SUFFIXES = {"bin": (".bin", ".idx"), "npy": ("_ids.npy", "_idx.npz")}
NPY_HEAD = 128  # bytes: what numpy itself writes before a list of integers
_NPY_MAGIC = b"\x93NUMPY"
_MAX_NPY_HEAD = 64 << 10  # bytes of a description
_NPZ_ERRORS = (
    zipfile.BadZipFile, zlib.error, ValueError, EOFError, NotImplementedError, RuntimeError, KeyError, TypeError,
    SyntaxError, OverflowError, MemoryError, struct.error,
)  # fmt: skip
_array_1_0, _array_2_0 = np.lib.format.read_array_header_1_0, np.lib.format.read_array_header_2_0
_STEP = 1 << 22  # entries looked at together when an index is checked
WHOLE = 1 << 30  # bytes of tokens that are all read for the fingerprint; beyond, evenly spaced blocks of them


@dataclass
class TokenFiles:
    """Sequences end to end in one file; document d is sequences docs[d] to docs[d + 1]."""

    prefix: str
    path: Path  # of the tokens
    first_byte: int  # where they begin in it
    dtype: np.dtype[Any]
    sizes: np.ndarray  # int32 [sequences]: tokens of each
    pointers: np.ndarray  # int64 [sequences]: bytes before it
    docs: np.ndarray  # int64 [documents + 1]
    name: str = ""  # what a person calls it; the prefix when not given
    num_tokens: int = field(init=False)
    _fingerprint: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self.name = self.name or self.prefix
        last = len(self.sizes) - 1
        self.num_tokens = int(self.pointers[last]) // self.dtype.itemsize + int(self.sizes[last]) if last >= 0 else 0
        self._file = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    @property
    def num_documents(self) -> int:
        return len(self.docs) - 1

    def starts(self, documents: np.ndarray) -> np.ndarray:
        """Tokens before each of these documents; document `num_documents` would begin at the end."""
        sequence = self.docs[documents]
        inside = sequence < len(self.sizes)
        out = np.full(len(sequence), self.num_tokens, np.int64)
        out[inside] = self.pointers[sequence[inside]] // self.dtype.itemsize
        return out

    def lengths(self, first: int, last: int) -> np.ndarray:
        """Tokens of documents [first, last)."""
        if len(self.docs) == len(self.sizes) + 1 and int(self.docs[-1]) == len(self.sizes):
            bounds = self.docs[first : last + 1]
            if int(bounds[0]) == first and int(bounds[-1]) == last and (np.diff(bounds) == 1).all():
                return np.array(self.sizes[first:last])  # a sequence a document, as nearly always
        return np.diff(self.starts(np.arange(first, last + 1)))

    def tokens(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of the file, int32."""
        width = self.dtype.itemsize
        raw = os.pread(self._file, count * width, self.first_byte + start * width)
        if len(raw) != count * width:
            raise DataError("the token file was changed while in use", where=str(self.path), fix="start again")
        return np.frombuffer(raw, self.dtype).astype(np.int32)

    def fingerprint(self) -> str:
        """Of every length and of the tokens: all of them up to WHOLE bytes, beyond that 64 MiB in blocks from the
        first to the last (`sampled`), so that a start need not read a terabyte."""
        if self._fingerprint:
            return self._fingerprint
        digest = hashlib.blake2b(f"{self.dtype.str} {self.num_tokens}".encode(), digest_size=16)
        for array in (self.sizes, self.docs):
            for at in range(0, len(array), _STEP):
                digest.update(np.ascontiguousarray(array[at : at + _STEP]).data)
        sealed.add_content(digest, self._file, self.first_byte, self.num_tokens * self.dtype.itemsize, WHOLE)
        self._fingerprint = digest.hexdigest()
        return self._fingerprint

    @property
    def sampled(self) -> bool:
        """Whether the fingerprint covers blocks of the tokens only; then `written` may show a change it missed."""
        return self.num_tokens * self.dtype.itemsize > WHOLE

    @property
    def written(self) -> int:
        """When the token file was last written, in ns since 1970."""
        return os.fstat(self._file).st_mtime_ns

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


def find(path: str | Path) -> list[str]:
    """Prefixes of the data sets that `path` names: a prefix, one of its files, or a folder that holds some."""
    name = str(Path(path).expanduser())
    for pair in SUFFIXES.values():
        bare = next((name.removesuffix(suffix) for suffix in pair if name.endswith(suffix)), name)
        for suffix in pair:
            refuse_special(bare + suffix, DataError)
        if all(os.path.isfile(bare + suffix) for suffix in pair):
            return [bare]
        there = [suffix for suffix in pair if os.path.isfile(bare + suffix)]
        if there:
            missing = next(suffix for suffix in pair if suffix not in there)
            raise DataError(
                f"half of a data set: {bare + there[0]} has no {Path(bare + missing).name} next to it",
                where=name,
                fix="copy both files",
            )
    if not os.path.isdir(name):
        raise DataError(
            f"no token files at {name}",
            where="input_dir",
            fix=f"{name}.bin and {name}.idx are expected (or _ids.npy and _idx.npz); `erniekit data index` makes them",
        )
    found = {
        str(file).removesuffix(suffix)
        for _, suffix in SUFFIXES.values()
        for file in Path(name).iterdir()
        if file.name.endswith(suffix)
    }
    if not found:
        raise DataError(
            "the folder holds no .idx and no _idx.npz file",
            where=name,
            fix="`erniekit data index FILE --output PREFIX` makes them from text",
        )
    return sorted(prefix for one in found for prefix in find(one))


def open_files(prefix: str) -> TokenFiles:
    """The data set of one prefix (see `find`), checked: every length fits the other and the files' sizes."""
    try:
        read = _open_bin if os.path.isfile(prefix + ".idx") else _open_npy
        files = read(prefix)
    except OSError as error:
        raise DataError(f"token files cannot be read: {error.strerror}", where=str(error.filename)) from error
    _check(files)
    return files


def _open_bin(prefix: str) -> TokenFiles:
    path = Path(prefix + ".idx")
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(_HEAD.size)
    if head[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"not an index of tokens: it begins with {head[:9]!r}, {MAGIC!r} is expected",
            where=str(path),
            fix="make it with `erniekit data index`, Megatron's or PaddleNLP's preprocessing",
        )
    if len(head) < _HEAD.size:
        raise _broken(path, f"the file ends in its header: {size} bytes, {_HEAD.size} at least are expected")
    _, version, code, sequences, entries = _HEAD.unpack(head)
    if version != VERSION:
        raise DataError(f"an index of version {version}; version {VERSION} is known", where=str(path))
    if code not in CODES:
        what = "numbers with a fraction, not tokens" if code in _FLOATS else "unknown to the format"
        raise DataError(f"dtype code {code} is {what}", where=str(path), fix=f"integers have the codes {[*CODES]}")
    expected = _HEAD.size + 12 * sequences + 8 * entries
    # One more byte a sequence: the modes that Megatron writes for data of several kinds. Text has no use for them.
    if size not in (expected, expected + sequences):
        text = f"{sequences:,} sequences and {entries:,} document bounds need {expected:,} bytes, the file has {size:,}"
        raise _broken(path, text)

    def array(dtype: str, count: int, at: int) -> np.ndarray:
        # A plain view: a memmap's own class makes every slice slower.
        return np.asarray(np.memmap(path, dtype, "r", at, (count,))) if count else np.zeros(0, dtype)

    sizes = array("<i4", sequences, _HEAD.size)
    pointers = array("<i8", sequences, _HEAD.size + 4 * sequences)
    docs = array("<i8", entries, _HEAD.size + 12 * sequences)
    return TokenFiles(prefix, Path(prefix + ".bin"), 0, np.dtype(CODES[code]), sizes, pointers, docs)


def _open_npy(prefix: str) -> TokenFiles:
    path, index = Path(prefix + "_ids.npy"), Path(prefix + "_idx.npz")
    dtype, count, first_byte = _npy_head(path)
    _check_npz(index, count)
    try:
        with np.load(index, allow_pickle=False) as stored:
            if "lens" not in stored:
                raise _broken(index, f"it has {', '.join(stored.files) or 'nothing'}; `lens` is expected")
            sizes = _whole_numbers(stored["lens"], "lens", index).astype(np.int32)
            docs = np.arange(len(sizes) + 1)
            if "docs" in stored:
                docs = _whole_numbers(stored["docs"], "docs", index).astype(np.int64)
    except _NPZ_ERRORS as error:
        raise _broken(index, f"not a readable .npz: {error}") from error
    ends = np.cumsum(sizes, dtype=np.int64)
    if len(ends) and int(ends[-1]) != count:
        raise _broken(path, f"{index.name} describes {int(ends[-1]):,} tokens, the file holds {count:,}")
    return TokenFiles(prefix, path, first_byte, dtype, sizes, (ends - sizes) * dtype.itemsize, docs)


def _check_npz(index: Path, tokens: int) -> None:
    """A few bytes can unpack to, or announce, terabytes: no more than an entry for each token, and some to spare."""
    limit = 16 * tokens + (64 << 20)
    try:
        with zipfile.ZipFile(index) as file:
            for entry in file.infolist():
                if entry.file_size > limit:
                    text = f"{entry.filename} unpacks to {entry.file_size:,} bytes for {tokens:,} tokens"
                    raise _broken(index, text)
                with file.open(entry) as stored:
                    if stored.read(6) != _NPY_MAGIC:
                        continue
                    stored.seek(0)
                    read = np.lib.format.read_magic(stored)
                    head = (_array_1_0 if read == (1, 0) else _array_2_0)(stored)
                    if head[2].hasobject or math.prod(head[0]) * head[2].itemsize > entry.file_size:
                        raise _broken(index, f"{entry.filename} announces {head[0]} entries of {head[2]}")
    except _NPZ_ERRORS as error:
        raise _broken(index, f"not a readable .npz: {error}") from error


def _whole_numbers(array: np.ndarray, name: str, index: Path) -> np.ndarray:
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise _broken(index, f"`{name}` is {array.ndim}-dimensional {array.dtype}, a row of whole numbers is expected")
    return array


def _npy_head(path: Path) -> tuple[np.dtype[Any], int, int]:
    """Of a .npy file: dtype, entries, and where they begin."""
    try:
        with open(path, "rb") as file:
            magic = file.read(8)
            wide = magic[6] > 1
            (length,) = struct.unpack("<I" if wide else "<H", file.read(4 if wide else 2))
            if magic[:6] != _NPY_MAGIC or length > _MAX_NPY_HEAD:
                raise ValueError("no header")
            text = ast.literal_eval(file.read(length).decode("latin-1"))
            begin = file.tell()
        dtype, (count,) = np.dtype(text["descr"]), text["shape"]
        if not isinstance(count, int) or count < 0:
            raise ValueError("no size")
    except (
        IndexError,
        struct.error,
        SyntaxError,
        ValueError,
        KeyError,
        TypeError,
        MemoryError,
        RecursionError,
    ) as error:
        raise _broken(path, "not a .npy file of one row of tokens") from error
    if dtype.kind not in "iu":
        raise DataError(f"{dtype} values are not tokens", where=str(path), fix="integers are expected")
    return dtype, count, begin


def _check(files: TokenFiles) -> None:
    """Sequences follow each other without a gap, documents too, and the token file is as long as they declare."""
    index = Path(files.prefix + (".idx" if files.path.suffix == ".bin" else "_idx.npz"))
    count, width, at = len(files.sizes), files.dtype.itemsize, 0
    for first in range(0, count, _STEP):
        sizes, pointers = (array[first : first + _STEP] for array in (files.sizes, files.pointers))
        ends = at + np.cumsum(sizes, dtype=np.int64) * width
        wrong = (sizes < 0) | (pointers != ends - sizes * np.int64(width))
        if wrong.any():
            number = int(np.flatnonzero(wrong)[0])
            text = f"sequence {first + number:,} of {sizes[number]:,} tokens is declared to begin at byte"
            raise _broken(index, f"{text} {pointers[number]:,}, not where the one before it ends")
        at = int(ends[-1])
    size = files.path.stat().st_size - files.first_byte
    if size != at:
        text = f"{index.name} describes {at:,} bytes of {files.dtype.name} tokens, the file holds {size:,}"
        raise _broken(files.path, text)
    docs = files.docs
    if not len(docs) or docs[0] != 0 or docs[-1] != count or (np.diff(docs) < 0).any():
        ends_at = f"from {docs[0]} to {docs[-1]:,}" if len(docs) else "nothing"
        raise _broken(index, f"document bounds must rise from 0 to {count:,} sequences; they say {ends_at}")


def _broken(path: Path, what: str) -> DataError:
    return DataError(what, where=str(path), fix="the file is cut off or of another data set: copy or make it again")


def narrowest(vocab_size: int) -> str:
    """The dtype that holds every token of a vocabulary, as Megatron and PaddleNLP choose it."""
    return "uint16" if vocab_size < 65500 else "int32"


def write_idx(out: IO[bytes], dtype: np.dtype[Any], sizes: np.ndarray, docs: np.ndarray) -> None:
    """The .idx of sequences that lie end to end in a .bin."""
    code = next(code for code, known in CODES.items() if np.dtype(known) == dtype)
    out.write(_HEAD.pack(MAGIC, VERSION, code, len(sizes), len(docs)))
    for at in range(0, len(sizes), _STEP):
        out.write(sizes[at : at + _STEP].astype("<i4").tobytes())
    before = 0
    for at in range(0, len(sizes), _STEP):
        ends = before + np.cumsum(sizes[at : at + _STEP], dtype=np.int64) * dtype.itemsize
        out.write((ends - sizes[at : at + _STEP] * np.int64(dtype.itemsize)).astype("<i8").tobytes())
        before = int(ends[-1])
    for at in range(0, len(docs), _STEP):
        out.write(docs[at : at + _STEP].astype("<i8").tobytes())


def npy_head(dtype: np.dtype[Any], count: int) -> bytes:
    """What stands before `count` tokens in a .npy: always NPY_HEAD bytes, so it can be filled in at the end."""
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': ({count},), }}"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", NPY_HEAD - 10) + text.ljust(NPY_HEAD - 11).encode() + b"\n"


def write_npz(out: IO[bytes], sizes: np.ndarray, docs: np.ndarray) -> None:
    """`lens` and `docs`, as np.savez would, but the same bytes whenever it is made."""
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as file:
        for name, array in (("lens", sizes.astype("<i4")), ("docs", docs.astype("<i8"))):
            entry = zipfile.ZipInfo(f"{name}.npy")  # dated 1980
            with file.open(entry, "w", force_zip64=True) as stored:
                np.lib.format.write_array(stored, array)
