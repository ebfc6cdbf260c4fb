"""The files that a recipe names: those of folders and patterns one by one, with their formats and shares.

Used by datasets.py and score_heads.py.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from erniekit.config import RunConfig
from erniekit.data.storage import DatasetFile, HubDataset, LocalFile, as_place, is_remote, listed_files, located
from erniekit.errors import ConfigError, DataError
from erniekit.printable import counted


def dataset_files(cfg: RunConfig, which: str) -> tuple[list[DatasetFile], list[str | None]]:
    """The train or eval files, those of folders and patterns one by one, each with its format where that is given."""
    paths, formats = cfg[f"{which}_dataset_path"], cfg[f"{which}_dataset_type"]
    if formats and len(formats) != len(paths):
        raise ConfigError(
            f"{counted(len(paths), 'file')} but {counted(len(formats), 'format')}",
            where=f"{which}_dataset_path, {which}_dataset_type",
            fix="give one format for each file, or none: they are detected",
        )
    for path in paths if which == "eval" else ():
        if is_remote(path) and isinstance(place := located(path), HubDataset) and not place.names_split:
            raise ConfigError(
                "which split is evaluated on is not given",
                where=f"eval_dataset_path: {path}",
                fix=f"name it: {path}?split=test",
            )
    files = listed_files(paths, text=cfg.train.stage == "PT")
    _refuse_others(files, paths)
    named = [None if name == "auto" else name for name in formats] or [None] * len(paths)
    return files, [named[file.entry] for file in files]


def _refuse_others(files: Sequence[DatasetFile], paths: Sequence[str]) -> None:
    """Before any is read, which may take minutes: what is no file in a folder, or under a pattern."""
    faulty: list[DataError] = []
    for file in files:
        place = located(file.path)
        if isinstance(place, LocalFile) and place.path != as_place(paths[file.entry]):
            try:
                place.refuse_other()
            except DataError as error:
                faulty.append(error)
    if faulty:
        first, more = faulty[0], len(faulty) - 1
        where = f"{first.where}, and {more:,} more that cannot be opened" if more else first.where
        raise DataError(first.what, where=where, fix=first.fix)


@contextmanager
def one_of_several(cfg: RunConfig, which: str) -> Iterator[None]:
    """Errors of the files within end with how all files of a folder or a pattern are looked at."""
    try:
        yield
    except DataError as error:
        paths = cfg[f"{which}_dataset_path"]
        members = Counter(file.entry for file in listed_files(paths, text=cfg.train.stage == "PT"))
        if several := [shlex.quote(str(paths[entry])) for entry, count in members.items() if count > 1]:
            error.fix += f"; `erniekit data {' '.join(several)}` checks all files"
        raise


def file_shares(cfg: RunConfig, which: str, sizes: Sequence[int], given: Sequence[float] | None = None) -> list[float]:
    """Of each file in the mixture. What the recipe, or `given`, gives a folder or a pattern is divided by its files'
    samples."""
    files = dataset_files(cfg, which)[0]
    given = given or list(cfg[f"{which}_dataset_prob"]) or [1.0] * (1 + max(file.entry for file in files))
    together, members = Counter[int](), Counter(file.entry for file in files)
    for file, size in zip(files, sizes):
        together[file.entry] += size
    return [
        given[file.entry] * (1.0 if members[file.entry] == 1 else size / max(1, together[file.entry]))
        for file, size in zip(files, sizes)
    ]
