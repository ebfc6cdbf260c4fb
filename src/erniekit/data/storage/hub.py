"""A dataset of the Hugging Face Hub, or a folder that `datasets` loads, streamed row by row.

Written hf:OWNER/NAME, with ?split=, config= and revision= behind it; or OWNER/NAME alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from erniekit.data.storage.base import Identity, Unchanged
from erniekit.data.types import UNREADABLE, RowProblem
from erniekit.errors import DataError
from erniekit.extras import install_command

PREFIXES = ("hf://datasets/", "hf:")
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(\?.*)?")
_OPTIONS = ("split", "config", "revision")


def is_hub_id(word: str) -> bool:
    """OWNER/NAME, with nothing of that name here; files have a suffix."""
    name = word.partition("?")[0]
    return bool(_ID.fullmatch(word)) and not Path(name).suffix and not os.path.lexists(Path(name).expanduser())


class HubDataset:
    """`str()` of it is how the user wrote it."""

    names_version = True

    def __init__(self, word: str) -> None:
        self.word = word
        for prefix in PREFIXES:
            word = word.removeprefix(prefix)
        self.id, _, query = word.partition("?")
        self.options = dict(parse_qsl(query))
        if unknown := [name for name in self.options if name not in _OPTIONS]:
            raise DataError(f"{unknown[0]!r} is not an option", where=self.word, fix=f"options: {', '.join(_OPTIONS)}")
        self._builder: Any = None

    def __str__(self) -> str:
        return self.word

    @property
    def name(self) -> str:
        return self.id

    @property
    def names_split(self) -> bool:
        return "split" in self.options

    def rows(self) -> Iterator[tuple[int, dict[str, Any] | RowProblem]]:
        """In the order of the dataset. What cannot be read further is said, as for a file."""
        number = 0
        split = self._split()
        try:
            for number, row in enumerate(self._opened().as_streaming_dataset(split=split), 1):
                yield number, dict(row)
        except Exception as error:
            told = f"the dataset cannot be read further: {type(error).__name__}: {error}"
            yield number + 1, RowProblem(self.word, number + 1, UNREADABLE, told)

    def identity(self) -> Identity:
        digest = self.quick_identity()
        return Identity(digest, 0, Unchanged(self, digest))

    def quick_identity(self) -> str:
        """Of the revision on the hub, or of the files of a folder."""
        builder, split = self._opened(), self._split()
        files = builder.config.data_files
        of_split = (files or {}).get(split)
        origin = getattr(of_split, "origin_metadata", None)
        told = [self.id, split, builder.config.name, builder.hash, origin and [list(map(str, one)) for one in origin]]
        return hashlib.blake2b(json.dumps(told).encode(), digest_size=20).hexdigest()

    def stamp(self) -> Any:
        self._builder = None
        return self.quick_identity()

    def _split(self) -> str:
        builder = self._opened()
        names = list(builder.config.data_files or builder.info.splits or ())
        asked = self.options.get("split") or ("train" if "train" in names else names[0] if len(names) == 1 else "")
        if asked not in names:
            raise DataError(
                f"no split {asked!r}" if asked else "which split is meant?",
                where=self.word,
                fix=f"splits are {', '.join(map(str, names))}: {self.id}?split={names[0] if names else 'train'}",
            )
        return asked

    def _opened(self) -> Any:
        if self._builder is None:
            try:
                import datasets
            except ImportError as error:
                raise DataError(
                    f"{self.id} is not a file or folder here, and datasets of the hub need the package `datasets`",
                    where=self.word,
                    fix=f"check the path, or {install_command('hub')}",
                ) from error
            datasets.disable_progress_bars()
            config, revision = self.options.get("config"), self.options.get("revision")
            try:
                self._builder = datasets.load_dataset_builder(self.id, config, revision=revision)
            except Exception as error:
                raise DataError(
                    f"dataset {self.id} cannot be opened: {type(error).__name__}: {error}",
                    where=self.word,
                    fix="a file or folder here must exist; a dataset of the hub is OWNER/NAME",
                ) from error
        return self._builder
