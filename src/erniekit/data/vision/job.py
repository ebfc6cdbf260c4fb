"""Rows with pictures of one dataset file -> samples in a cache folder; opened again as a VisionSource.

The token cache runs the job, text rows and all; media are read by a process of their own that can be killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import IO, Any, ClassVar, Literal

import numpy as np

from erniekit import heartbeat
from erniekit.data import cache_versions
from erniekit.data.assemble import Assembled
from erniekit.data.chunks import COUNTED, Arrays, Chunk
from erniekit.data.formats import FORMATS, detect, parsed
from erniekit.data.formats.fields import BadRow
from erniekit.data.media.decode import Medium, ReadPatches
from erniekit.data.media.limits import MediaError, MediaLimits
from erniekit.data.media.place import MediaPlace
from erniekit.data.media.worker import MediaPool
from erniekit.data.processes import started
from erniekit.data.report import FAULT, BadRowsFile, DataReport
from erniekit.data.thinking import Thinking
from erniekit.data.token_cache import TokenSource, preference_rows, tokenised
from erniekit.data.tokenise import Rows, TokeniseJob
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import TEXT, RowProblem, Sample, SampleMedia
from erniekit.data.vision.layout import HeaderOf, headers_from
from erniekit.data.vision.read import read_vision_row
from erniekit.data.vision.rules import VisionRules
from erniekit.data.vision.tokens import VisionAssembler
from erniekit.data.vision.vision_row import VisionRow
from erniekit.errors import ErnieKitError
from erniekit.printable import fault_of

MODALITY, POSITIONS, MEDIA, MEDIA_OFFSETS, PATCHES, INLINE, STATES = (
    "modality.bin",
    "positions.bin",
    "media.jsonl",
    "media.npy",
    "patches.npy",
    "inline.bin",
    "media_files.json",
)
_CUT_OFF = ("timeout", "decoder_died")  # kinds of bad rows that another try may find whole

FileState = tuple[int, int]  # size and time of change; -1, -1: not there


@dataclass
class MediaColumns:
    """What the samples of a chunk have besides ids and labels."""

    modality: np.ndarray
    positions: np.ndarray
    media: list[list[Medium]]  # per sample
    states: dict[str, FileState] = field(default_factory=dict)  # of all files that the chunk's rows name


@dataclass(frozen=True)
class VisionJob(TokeniseJob):
    rules: VisionRules = field(default_factory=VisionRules)
    chunk_rows: ClassVar[int] = 16  # a row may hold many pictures

    @property
    def two_forms(self) -> bool:
        return False

    def more_key(self) -> dict[str, Any]:
        return {
            "vision": self.rules.cache_key(),
            "vision_version": cache_versions.VISION,
            "folder": str(Path(self.path).absolute().parent),  # relative paths start there
        }

    def more_files(self, folder: Path) -> MediaFiles:
        return MediaFiles(folder)

    def is_current(self, folder: Path) -> bool:
        """What a decoder was cut off from counts for the run that saw it: the next one tries again."""
        kept = json.loads((folder / STATES).read_text(encoding="utf-8"))
        if kept["cut_off"] is not None and kept["cut_off"] < started():
            return False
        return all(_state(path) == tuple(state) for path, state in kept["files"].items())

    def work(self, batch: Rows) -> Chunk:
        out = Chunk(len(batch), Arrays.join([]), Arrays.join([]))
        samples: list[tuple[int, Sample]] = []
        states: dict[str, FileState] = {}
        for line, raw in heartbeat.each(batch):
            try:
                row = parsed(raw, line, self.path, self.vision_row)
                if isinstance(row, RowProblem):
                    out.bad.append((line, row.kind, row.reason))
                    continue
                out.unused.update(row.unused)
                for place in (place for given in row.media for place in given.sources if place.path):
                    states.setdefault(place.path, _state(place.path))  # before it is read: a later repair is a change
                made = self._assembled(row)
            except (MediaError, BadRow) as error:
                out.bad.append((line, error.kind, error.reason))
                continue
            except ErnieKitError:
                raise
            except Exception as error:  # one odd row must not end hours of work
                out.bad.append((line, FAULT, fault_of(error)))
                continue
            if isinstance(made, Assembled):
                samples.append((line, made.sample))
                out.sums.update({name: count for name in COUNTED if (count := getattr(made, name))})
            else:
                out.dropped.append((line, made.kind, made.reason))
        out.main, out.media = Arrays.join(samples), _columns([sample for _, sample in samples], states)
        return out

    def vision_row(self, row: Any) -> VisionRow:
        return read_vision_row(row, Path(self.path).absolute().parent, self.format, self.rules.compat)

    def _assembled(self, row: VisionRow) -> Any:
        made = self._sample(row)
        if isinstance(made, Assembled) and made.sample.media is not None and self.rules.check == "decode":
            for medium in made.sample.media.sources:
                work = ReadPatches(medium, self.rules.limits, check=True)
                decoder().run(work, medium.places[0].name, self.rules.limits)
        return made

    def _sample(self, row: VisionRow) -> Any:
        return self._assembler.sample(row, self.max_seq_len, self.overlong, self._header)

    @property
    def _header(self) -> HeaderOf:
        return headers_from(decoder(), self.rules.limits)

    @cached_property
    def _assembler(self) -> VisionAssembler:
        return VisionAssembler(self.tokenizer, self.rules, self.thinking)


@cache
def decoder() -> MediaPool:
    """Of this process, for all its files."""
    return MediaPool(1, MediaLimits())


def _columns(samples: list[Sample], states: dict[str, FileState]) -> MediaColumns:
    media = [sample.media for sample in samples]
    assert all(media)
    return MediaColumns(
        np.concatenate([np.zeros(0, np.uint8), *(m.modality for m in media if m)]),
        np.concatenate([np.zeros((0, 3), np.int32), *(m.positions for m in media if m)]),
        [list(m.sources) for m in media if m],
        states,
    )


def _state(path: str) -> FileState:
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # the latter of a path with a zero byte
        return -1, -1
    return found.st_size, found.st_mtime_ns


class MediaFiles:
    """Writes the columns of the samples, and the bytes of media that rows hold themselves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, IO[bytes]] = {
            name: open(folder / name, "wb")  # noqa: SIM115 - closed by finish
            for name in (MODALITY, POSITIONS, MEDIA, INLINE)
        }
        self._offsets, self._patches, self._states = [0], list[int](), dict[str, FileState]()
        self._cut_off = False
        self._counts: Counter[str] = Counter()
        self._digest = hashlib.blake2b(digest_size=16)  # of what all media hold, in order

    def add(self, chunk: Chunk) -> None:
        columns: MediaColumns = chunk.media
        self._files[MODALITY].write(columns.modality.tobytes())
        self._files[POSITIONS].write(columns.positions.tobytes())
        for path, state in columns.states.items():
            self._states.setdefault(path, state)  # as first seen
        self._cut_off |= any(kind in _CUT_OFF for _, kind, _ in chunk.bad)
        self._counts["vision_tokens"] += int((columns.modality != TEXT).sum())
        for media in columns.media:
            entries = [self._kept(medium).to_json() for medium in media]
            line = json.dumps(entries, separators=(",", ":")).encode() + b"\n"
            self._files[MEDIA].write(line)
            self._offsets.append(self._offsets[-1] + len(line))
            self._patches.append(sum(int(np.prod(medium.grid)) for medium in media))
            self._digest.update("".join(digest for medium in media for digest in (*medium.digests, " ")).encode())
            self._counts.update("videos" if medium.video else "pictures" for medium in media)

    def finish(self, report: DataReport) -> None:
        for file in self._files.values():
            file.close()
        np.save(self.folder / MEDIA_OFFSETS, np.array(self._offsets, np.int64))
        np.save(self.folder / PATCHES, np.array(self._patches, np.int64))
        self._counts["patches"] = sum(self._patches)
        cut_off = time.time() if self._cut_off else None
        record = {"digest": self._digest.hexdigest(), "files": self._states, "cut_off": cut_off}
        (self.folder / STATES).write_text(json.dumps(record), encoding="utf-8")
        for name, count in self._counts.items():
            setattr(report, name, count)

    def _kept(self, medium: Medium) -> Medium:
        return replace(medium, places=tuple(map(self._stored, medium.places)))

    def _stored(self, place: MediaPlace) -> MediaPlace:
        if not place.content:
            return place
        file = self._files[INLINE]
        start = file.tell()
        file.write(place.content)
        return replace(place, content=b"", start=start, size=len(place.content))


class VisionSource(TokenSource):
    """Samples of one file with their media: references, no pixels."""

    def __init__(self, folder: Path, report: DataReport) -> None:
        super().__init__(folder, report)
        self._media_at = np.load(folder / MEDIA_OFFSETS, mmap_mode="r")
        names = (MODALITY, POSITIONS, MEDIA)
        self._media_files = [os.open(folder / name, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)) for name in names]
        self._files += self._media_files  # closed with them
        self.patches: np.ndarray = np.load(folder / PATCHES)  # int64
        self._media_digest = json.loads((folder / STATES).read_text(encoding="utf-8"))["digest"]

    @property
    def fingerprint(self) -> str:
        """The folder's name says nothing of what media hold."""
        return f"{self.folder.name}-{self._media_digest}"

    def sample(self, index: int) -> Sample:
        sample = super().sample(index)
        start, count = int(self._offsets[index]), int(self.lengths[index])
        modality = np.frombuffer(os.pread(self._media_files[0], count, start), np.uint8)
        positions = np.frombuffer(os.pread(self._media_files[1], 12 * count, 12 * start), np.int32).reshape(-1, 3)
        media = tuple(self._medium(one, index) for one in self._entries(index))
        grids = np.array([medium.grid for medium in media], np.int32).reshape(-1, 3)
        return replace(sample, media=SampleMedia(modality, positions, grids, media))

    def _entries(self, index: int) -> list[dict[str, Any]]:
        start, end = int(self._media_at[index]), int(self._media_at[index + 1])
        return json.loads(os.pread(self._media_files[2], end - start, start))

    def _medium(self, entry: dict[str, Any], index: int) -> Medium:
        medium = Medium.from_json(entry)
        inline = str(self.folder / INLINE)
        places = tuple(replace(p, path=inline) if p.size >= 0 and not p.path else p for p in medium.places)
        return replace(medium, places=places, origin=f"{self.path}:{self.row(index)}")


def open_vision_source(
    path: str | Path,
    format: str | None,
    tokenizer: Tokenizer,
    rules: VisionRules,
    *,
    max_seq_len: int,
    overlong: Literal["drop", "truncate"] = "drop",
    thinking: Thinking = "all",
    cache_dir: str | Path | None = None,
    num_proc: int | None = None,
    max_bad_fraction: float = 0.001,
    bad_rows: BadRowsFile | None = None,
    append_bad_rows: bool = False,
) -> VisionSource:
    """As token_cache.open_source, for rows with pictures. The cache's key holds every field of `rules` that can change
    a sample; a file that changed since is found by size and time, and by its digest when it is decoded."""
    if format is None:
        found = detect(path, vision=True)
        if found.preference:
            raise preference_rows(path)
        format = found.format
    FORMATS.get(format)
    job = VisionJob(str(path), format, tokenizer, max_seq_len, overlong, rules.compat, thinking=thinking, rules=rules)
    folder, report = tokenised(job, cache_dir, num_proc, max_bad_fraction, bad_rows, append_bad_rows)
    return VisionSource(folder, report)
