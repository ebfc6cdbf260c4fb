"""The files that a recipe names: those of folders and patterns one by one, with their formats and shares.

Used by datasets.py and score_heads.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from erniekit.config import RunConfig
from erniekit.data.storage import DatasetFile, HubDataset, is_remote, listed_files, located
from erniekit.errors import ConfigError
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
    named = [None if name == "auto" else name for name in formats] or [None] * len(paths)
    return files, [named[file.entry] for file in files]


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
