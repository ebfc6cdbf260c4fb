"""Pre-training data of a run: which token files, blended how, as the rows that the loader reads by number.

recipes/ open it: `open_corpora` for files that are indexed, `index_online` for text that is not, then PretrainData.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import ceil
from pathlib import Path
from threading import Lock

import numpy as np

from erniekit.data import cache_versions, sealed
from erniekit.data.cache_lock import only_one
from erniekit.data.documents import DocumentRows, part_of
from erniekit.data.index import BAD, index_text
from erniekit.data.index_files import is_intact, is_published, published_names
from erniekit.data.mmap_files import SUFFIXES, TokenFiles, find, narrowest, open_files
from erniekit.data.pack import Members
from erniekit.data.report import BadRowsFile, DataReport, short
from erniekit.data.text_job import TextJob
from erniekit.data.token_cache import cores, identity_of
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import Pack
from erniekit.errors import ConfigError, DataError
from erniekit.files import OwnedFiles, own, settle
from erniekit.files.cache_folder import default_cache_dir
from erniekit.log import warn
from erniekit.printable import counted

BLOCK = 1024  # positions that are blended together
_BLOCKS_KEPT = 8
EVERYTHING = "1"  # as a split


class Blend:
    """Position i of a run is draw d of source s. The source that is furthest behind its share comes next, and every
    BLOCK positions the counts are those of the exact shares: so any position is known without those before."""

    def __init__(self, shares: Sequence[Fraction]) -> None:
        self.shares = list(shares)
        self._tables: OrderedDict[int, tuple[list[int], list[int]]] = OrderedDict()
        self._lock = Lock()

    def __getitem__(self, position: int) -> tuple[int, int]:
        if len(self.shares) == 1:
            return 0, position
        block, offset = divmod(position, BLOCK)
        with self._lock:
            if block not in self._tables:
                self._tables[block] = self._table(block)
                while len(self._tables) > _BLOCKS_KEPT:
                    self._tables.popitem(last=False)
            sources, draws = self._tables[block]
        return sources[offset], draws[offset]

    def before(self, position: int) -> list[int]:
        """Draws of each source before a position where a block begins: rounded running shares, so they never fall and
        sum to the position."""
        running, bounds = Fraction(0), [0]
        for share in self.shares:
            running += share
            bounds.append((2 * position * running.numerator + running.denominator) // (2 * running.denominator))
        return [b - a for a, b in pairwise(bounds)]

    def _table(self, block: int) -> tuple[list[int], list[int]]:
        first, last = self.before(block * BLOCK), self.before((block + 1) * BLOCK)
        left, done = [b - a for a, b in zip(first, last)], list(first)
        step = np.array([float(share) for share in self.shares])
        behind = np.array([float(share * block * BLOCK - drawn) for share, drawn in zip(self.shares, first)])
        behind[[k for k, count in enumerate(left) if not count]] = -np.inf
        sources, draws = [], []
        for _ in range(BLOCK):
            behind += step
            k = int(behind.argmax())
            sources.append(k)
            draws.append(done[k])
            done[k] += 1
            left[k] -= 1
            behind[k] = behind[k] - 1 if left[k] else -np.inf
        return sources, draws


class RowStream:
    """The loader reads it like a PackStream: `stream[p]` is what row p of the run is made of."""

    def __init__(self, blend: Blend, sources: Sequence[DocumentRows], rows: int, epochs: int | None) -> None:
        self.blend, self.sources, self.rows, self.epochs = blend, sources, rows, epochs
        self.max_seq_len = sources[0].max_seq_len

    def __getitem__(self, number: int) -> Members:
        if self.epochs is not None and number >= len(self):
            raise IndexError(f"row {number} of {len(self)}")
        source, row = self.blend[number]
        return [(source, index) for index in self.sources[source].members(row)]

    def __len__(self) -> int:
        if self.epochs is None:
            raise TypeError("this stream has no end; count_packs(epochs) counts a part of it")
        return self.epochs * self.rows

    def count_packs(self, epochs: float = 1) -> int:
        return ceil(epochs * self.rows)


class PretrainData:
    """`len` rows an epoch: as many as the sources have together. Without weights each comes once in an epoch; with
    them each source has its share of the rows, and goes through its own documents as often as that takes.

    `stream` and `sources` are a BatchLoader's; `epochs` bounds them (evaluation: 1).
    """

    def __init__(
        self,
        corpora: Sequence[TokenFiles],
        weights: Sequence[float] | None = None,
        *,
        max_seq_len: int,
        split: str = EVERYTHING,
        part: str = "train",
        seed: int = 0,
        shuffle: bool = True,
        masked: bool = False,
        epochs: int | None = None,
        vocab_size: int | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        weights = _checked(weights, len(corpora))
        all_rows = [
            DocumentRows(
                files,
                part_of(split, files.num_documents, part),
                max_seq_len,
                seed=seed,
                number=number,
                shuffle=shuffle,
                masked=masked,
                vocab_size=vocab_size,
                cache_dir=cache_dir,
            )
            for number, files in enumerate(corpora)
        ]
        live = [k for k, rows in enumerate(all_rows) if rows.rows and (weights is None or weights[k] > 0)]
        self.sources = [all_rows[k] for k in live]
        for k, rows in enumerate(all_rows):
            if not rows.rows and (not live or (part == "train" and (weights is None or weights[k] > 0))):
                raise DataError(
                    f"no row of text for `{part}`: {counted(len(rows.part), 'document')} with "
                    + counted(rows.tokens, "token"),
                    where=f"{rows.files.name}, split={split}",
                    fix="give this part a larger share in `split`, index more text, or set its weight to 0",
                )
        rows_of = [source.rows for source in self.sources]
        given = [Fraction(n) for n in rows_of] if weights is None else [Fraction(str(weights[k])) for k in live]
        self.shares = [share / sum(given) for share in given]
        self.stream = RowStream(Blend(self.shares), self.sources, sum(rows_of), epochs)

    def __len__(self) -> int:
        return self.stream.rows

    def pack(self, number: int) -> Pack:
        """Row `number` of the run, of whichever epoch it is."""
        return Pack(tuple(self.sources[s].sample(i) for s, i in self.stream[number]), number)

    def fingerprints(self) -> list[str]:
        """What a resumed run must find again, besides its seed and keys: each data set's content, place (which seeds
        its order), documents and share of the rows."""
        return [
            f"{source.files.fingerprint()} {source.part} number {source.number} share {share}"
            for source, share in zip(self.sources, self.shares)
        ]

    def written(self) -> dict[str, int]:
        """When the data sets whose fingerprint covers only samples were last written."""
        return {Path(s.files.path).name: s.files.written for s in self.sources if s.files.sampled}

    def lines(self) -> list[str]:
        out = []
        for source, share in zip(self.sources, self.shares):
            have, of_all = len(source.part), source.files.num_documents
            documents = counted(have, "document") if have == of_all else f"{have:,} of {of_all:,} documents (split)"
            text = f"{documents}, {short(source.tokens)} tokens, {counted(source.rows, 'row')}"
            passes = float(share) * len(self) / source.rows
            blended = f", {float(share):.1%} of the rows ({passes:.2f} passes an epoch)" if len(self.shares) > 1 else ""
            out.append(f"{source.files.name}: {text}{blended}")
        return out


def _checked(weights: Sequence[float] | None, count: int) -> Sequence[float] | None:
    if weights is None:
        return None
    if len(weights) != count:
        raise ConfigError(
            f"{counted(count, 'data set')} but {counted(len(weights), 'weight')}", where="data_filelist, data_weights"
        )
    if min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise ConfigError(
            f"weights {', '.join(map(str, weights))} cannot be normalised",
            where="input_dir",
            fix="give each data set a number of 0 or more, at least one above 0",
        )
    return weights


def open_corpora(
    input_dir: str | None, data_filelist: str | None = None, data_weights: str | None = None
) -> tuple[list[TokenFiles], list[float] | None]:
    """The data sets that the keys name, and their weights; None where none are given: each row once an epoch.

    `input_dir` is a prefix, a folder (every data set in it, all of weight 1), or "weight prefix weight prefix ...".
    `data_filelist` and `data_weights` are lists separated by commas or blanks, or files that hold one a line.
    """
    if data_filelist:
        named, numbers = _listed(data_filelist), _listed(data_weights) if data_weights else None
        weights = [_number(text, "data_weights") for text in numbers] if numbers is not None else None
    else:
        named, weights = _weighted_names(input_dir or "")
    if not named:
        raise ConfigError(
            "no pre-training data is named",
            where="input_dir",
            fix="name a prefix that `erniekit data index` made, or text with train_dataset_path",
        )
    prefixes = [find(name) for name in named]
    if len(named) == 1:
        found = prefixes[0]
        return [open_files(prefix) for prefix in found], [1.0] * len(found) if len(found) > 1 else None
    for name, several in zip(named, prefixes):
        if len(several) > 1:
            raise ConfigError(
                f"{name} holds {len(several)} data sets, one weight cannot be for all",
                where="input_dir",
                fix="name them one by one: " + " ".join(several[:3]),
            )
    return [open_files(several[0]) for several in prefixes], weights


def _weighted_names(input_dir: str) -> tuple[list[str], list[float] | None]:
    parts = input_dir.split()
    whole = Path(input_dir).expanduser()
    if not parts:
        return [], None
    if whole.is_dir() or any(Path(f"{whole}{end}").is_file() for pair in SUFFIXES.values() for end in pair):
        return [input_dir], None  # one path, with or without blanks in it
    if len(parts) < 2:
        return parts, None
    if len(parts) % 2 or not all(_is_number(text) for text in parts[::2]):
        if any(_is_number(text) for text in parts):
            raise ConfigError(
                f"{input_dir!r} is not weight and prefix by turns", where="input_dir", fix='as in "0.7 web 0.3 books"'
            )
        return parts, None
    return parts[1::2], [float(text) for text in parts[::2]]


def _is_number(text: str) -> bool:
    try:
        return float(text) == float(text)
    except ValueError:
        return False


def _number(text: str, key: str) -> float:
    if not _is_number(text):
        raise ConfigError(f"{text!r} is not a number", where=key)
    return float(text)


def _listed(value: str) -> list[str]:
    if Path(value).is_file():
        return [line.strip() for line in Path(value).read_text(encoding="utf-8").splitlines() if line.strip()]
    return value.replace(",", " ").split()


def index_online(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    json_key: str = "text",
    cache_dir: str | Path | None = None,
    num_proc: int | None = None,
    max_bad_fraction: float = 0.001,
    bad_rows: BadRowsFile | None = None,
) -> tuple[list[TokenFiles], list[DataReport]]:
    """Text files as they are: each is indexed into the cache once per content and tokenizer, documents ended by eos."""
    job = TextJob(tokenizer, json_key, True, narrowest(tokenizer.vocab_size))
    corpora: list[TokenFiles] = []
    reports: list[DataReport] = []
    for path in map(Path, paths):
        content = identity_of(path)
        text = [content.digest, tokenizer.fingerprint, json_key, "".join(path.suffixes[-2:]), cache_versions.DOCUMENTS]
        key = hashlib.blake2b(json.dumps(text).encode(), digest_size=16).hexdigest()
        prefix = Path(cache_dir or default_cache_dir()) / "documents" / key / "text"
        _remove_damaged(prefix)
        made = index_text(
            [path],
            prefix,
            job,
            num_proc=num_proc or cores(),
            max_bad_fraction=1.0,  # checked below, once its bad rows are listed where the run keeps them
            identity=content.digest,
            unchanged=[content.unchanged],
        )
        listed = Path(f"{made.prefix}_{BAD}")
        if bad_rows is not None and bad_rows.is_written:
            _list_bad_rows(listed, str(path), bad_rows.path, append=bool(reports))
        made.report.check(max_bad_fraction, listed if bad_rows is None else bad_rows.path)
        made.report.from_cache, made.report.content = not made.fresh, content.digest
        reports.append(made.report)
        corpora.append(replace(open_files(made.prefix), name=str(path)))
    return corpora, reports


def _remove_damaged(prefix: Path) -> None:
    """Token files in the cache that are no longer what was written: they are made again."""
    if not is_published(prefix) or is_intact(prefix):
        return
    with only_one(prefix.parent):
        if is_published(prefix) and not is_intact(prefix):  # another rank may have been first
            warn(f"the token files {prefix} are damaged: they are made again")
            sealed.clear(prefix.parent, published_names(prefix))


def _list_bad_rows(stored: Path, path: str, to: Path, append: bool) -> None:
    """All of a run's files in one list; no list where nothing is bad."""
    if not append:
        OwnedFiles(to.parent).remove(to.name)
    if stored.exists():
        own(to)
        with open(stored, encoding="utf-8") as rows, open(to, "a", encoding="utf-8") as out:
            for row in rows:
                out.write(json.dumps(json.loads(row) | {"file": path}, ensure_ascii=False) + "\n")
        settle(to)
