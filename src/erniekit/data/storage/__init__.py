"""Where datasets lie: on disk, behind a URL, in an object store, on the hub. `located` turns what the user wrote into
something to read, `listed_files` folders and patterns into their files. Called by whatever reads rows or text."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from erniekit.data.storage.base import StoredFile
from erniekit.data.storage.hub import PREFIXES, HubDataset, is_hub_id
from erniekit.data.storage.local import LocalFile
from erniekit.data.storage.object_store import ObjectFile
from erniekit.data.storage.web import WebFile
from erniekit.errors import DataError
from erniekit.log import warn_once
from erniekit.printable import HIDDEN

__all__ = ["DatasetFile", "HubDataset", "StoredFile", "as_place", "is_remote", "listed_files", "located"]

ROWS, TEXT = (".jsonl", ".json", ".csv", ".tsv", ".parquet"), (".txt",)
# Written next to rows by other programs; they hold none.
_METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_SHOWN = 4  # files of a folder that are not read


class DatasetFile(NamedTuple):
    path: str | Path  # text where it is remote: a Path would drop a slash of it
    entry: int  # which value of the key named it


def is_remote(path: str | Path) -> bool:
    return isinstance(path, str) and ("://" in path or path.startswith(PREFIXES) or is_hub_id(path))


def as_place(name: str | Path) -> str | Path:
    """A local path, `file://` too, as a Path; anything else as it was written."""
    if isinstance(name, str) and name.startswith("file://"):
        return Path(unquote(urlsplit(name).path))
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
        if not (files := [path for path in matched if path.is_file()]):
            raise DataError("no file matches this pattern", where=str(place), fix="check the folder and the pattern")
        return files
    return [place]


def _of_folder(folder: Path, text: bool) -> list[Path]:
    below = sorted(path for path in folder.rglob("*") if path.is_file())
    below = [path for path in below if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    found = [path for path in below if holds_data(path.name, text) and path.stat().st_size]
    left = set(below) - set(found)
    rest = [f"{path.relative_to(folder)}{'' if path.stat().st_size else ' (empty)'}" for path in sorted(left)]
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


def holds_data(name: str, text: bool) -> bool:
    """By its suffix."""
    last = name.lower().removesuffix(".gz")
    return last.endswith((*ROWS, *TEXT) if text else ROWS) and last.rpartition("/")[2] not in _METADATA
