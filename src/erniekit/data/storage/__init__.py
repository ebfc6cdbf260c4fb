"""Where datasets lie: on disk, behind a URL, in an object store, on the hub. `located` turns what the user wrote into
something to read, `listed_files` folders and patterns into their files. Called by whatever reads rows or text."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from erniekit.data.storage.base import Identity, StoredFile, Unchanged
from erniekit.data.storage.hub import PREFIXES, HubDataset, is_hub_id
from erniekit.data.storage.local import LocalFile
from erniekit.data.storage.object_store import ObjectFile
from erniekit.data.storage.web import WebFile
from erniekit.errors import DataError
from erniekit.log import warn_once
from erniekit.printable import HIDDEN

__all__ = [
    "DatasetFile",
    "HubDataset",
    "Identity",
    "LocalFile",
    "StoredFile",
    "Unchanged",
    "as_place",
    "is_remote",
    "listed_files",
    "located",
]

ROWS, TEXT = (".jsonl", ".json", ".csv", ".tsv", ".parquet"), (".txt",)
# Written next to rows by other programs; they hold none.
_METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_BLANK_BELOW = 1 << 20  # bytes; a larger file is taken to hold something
_SHOWN = 4  # files of a folder that are not read


class DatasetFile(NamedTuple):
    path: str | Path  # text where it is remote: a Path would drop a slash of it
    entry: int  # which value of the key named it


def is_remote(path: str | Path) -> bool:
    return isinstance(path, str) and ("://" in path or path.startswith(PREFIXES) or is_hub_id(path))


def as_place(name: str | Path) -> str | Path:
    """A local path, `file://` too, as a Path; anything else as it was written."""
    if isinstance(name, str) and name.startswith("file://"):
        host, slash, path = name.removeprefix("file://").partition("/")
        if host not in ("", "localhost") or not slash:
            raise DataError(
                "a file:// address begins with file:/// and a whole path; this one names a machine",
                where=name,
                fix=f"write file:///{name.removeprefix('file://')}, or the path alone",
            )
        place = unquote(urlsplit("file:///" + path).path)
        if "\0" in place:
            raise DataError("a file's name holds no NUL (%00)", where=name, fix="leave %00 out")
        return Path(place)
    return name if is_remote(name) else Path(name).expanduser()


def located(path: str | Path) -> StoredFile | HubDataset:
    place = as_place(path)
    if isinstance(place, Path):
        return LocalFile(place)
    if HIDDEN in place:
        raise DataError(
            "this address was stored without its password or signature",
            where=place,
            fix="give it again in full: train_dataset_path=URL or eval_dataset_path=URL",
        )
    if place.startswith(("http://", "https://")):
        return WebFile(place)
    return HubDataset(place) if place.startswith(PREFIXES) or "://" not in place else ObjectFile(place)


def listed_files(entries: Sequence[str | Path], text: bool = False) -> list[DatasetFile]:
    """Every entry as its files: itself, the files of a folder and all below it, or those a pattern matches, in the
    order of their names. text: .txt files hold data too."""
    return [DatasetFile(path, number) for number, entry in enumerate(entries) for path in _files_of(entry, text)]


def _files_of(entry: str | Path, text: bool) -> Sequence[str | Path]:
    place = as_place(entry)
    if isinstance(place, str):
        stored = located(place)
        found = stored.listed() if isinstance(stored, ObjectFile) else []
        return [name for name in found if holds_data(name, text)] or [place]
    if place.is_dir():
        return _of_folder(place, text)
    if not place.exists() and glob.has_magic(str(place)):
        matched = sorted(Path(name) for name in glob.glob(str(place), recursive=True))
        if not (files := [path for path in matched if not path.is_dir()]):
            raise DataError("no file matches this pattern", where=str(place), fix="check the folder and the pattern")
        return files
    return [place]


def _of_folder(folder: Path, text: bool) -> list[Path]:
    if folder.samefile(folder.absolute().anchor):
        raise DataError("the whole disk is no dataset", where=str(folder), fix="name the folder that holds the rows")
    below = sorted(_below(folder))
    found = [path for path in below if _is_data(path, text)]
    left = sorted(set(below) - set(found))
    rest = [f"{path.relative_to(folder)}{_why_left(path)}" for path in left]
    if not found:
        kinds = " ".join((*ROWS, *TEXT) if text else ROWS)
        fix = f"files of datasets end in {kinds}, or in one of these and .gz"
        if any(name.endswith(".arrow") for name in rest):
            fix = f"a folder that `datasets` saved: export it with to_json or to_parquet; {fix}"
        if any(name.removesuffix(".gz").endswith(TEXT) for name in rest):
            fix = f"stage: PT trains on .txt files; other {fix}"
        raise DataError("the folder holds no dataset file", where=str(folder), fix=fix)
    if rest:
        more = f" and {len(rest) - _SHOWN:,} more" if len(rest) > _SHOWN else ""
        warn_once(f"{folder}: not read: {', '.join(rest[:_SHOWN])}{more}")
    return found


def _below(folder: Path) -> Iterator[Path]:
    """Its files and links, and those of the folders in it; nothing whose name begins with a dot is looked into."""

    def refuse(error: OSError) -> None:
        why = f"a folder of the dataset cannot be read: {error.strerror}"
        raise DataError(why, where=str(error.filename), fix="change its permissions, or name the files")

    for place, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = (name for name in folders if not name.startswith("."))
        links = (name for name in folders if os.path.islink(os.path.join(place, name)))
        yield from (Path(place, name) for name in (*links, *files) if not name.startswith("."))


def _is_data(path: Path, text: bool) -> bool:
    """What is no file is data too, by its suffix: its reader says so, and no data is missing without a word."""
    if not path.exists() and not path.suffix:  # a link to nowhere: it may have been one to a folder of data
        return True
    return holds_data(path.name, text) and not path.is_dir() and not _is_blank(path)


def _why_left(path: Path) -> str:
    return " (a link to a folder)" if path.is_dir() else " (empty)" if _is_blank(path) else ""


def _is_blank(path: Path) -> bool:
    """Whether a file holds nothing but white space."""
    if not path.is_file() or path.stat().st_size > _BLANK_BELOW:
        return False
    try:
        with path.open("rb") as file:
            return not any(block.strip() for block in iter(lambda: file.read(1 << 14), b""))
    except OSError:
        return False  # its reader says so


def holds_data(name: str, text: bool) -> bool:
    """By its suffix."""
    last = name.lower().removesuffix(".gz")
    return last.endswith((*ROWS, *TEXT) if text else ROWS) and last.rpartition("/")[2] not in _METADATA
