"""Rows that a Python session holds in memory, as a JSONL file of the run: it can then resume, and report on them.

Used by api/training.py and recipes/session.py. Nothing is imported for them: a Hugging Face Dataset is an iterable of
dicts, and a pandas DataFrame has a method that returns a list of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from erniekit.errors import DataError
from erniekit.files import OwnedFiles
from erniekit.files.output import ROWS
from erniekit.files.record import Content

SHOWN = 60  # characters of a value in an error
IN_MEMORY = 16 << 20  # bytes; more wait in a temporary file


class GivenRows:
    """The rows of one argument, checked and written down; their file is named after their content."""

    def __init__(self, given: Any, argument: str) -> None:
        """argument: `data` or `eval_data`, for errors and the file's name. An iterator is read to its end."""
        self.count, self.size = 0, 0
        self._text: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 - lives as long as this
        digest = hashlib.sha256()
        for row in _rows(given, argument):
            self.count += 1
            line = _line(row, f"{argument}: row {self.count}")
            digest.update(line)
            self.size += len(line)
            self._text.write(line)
        if not self.count:
            raise DataError(
                f"{argument} holds no rows", where=argument, fix="give a list of dicts, or an iterable of them"
            )
        self.sha256 = digest.hexdigest()
        self.name = f"{argument}-{self.sha256[:12]}.jsonl"

    @contextmanager
    def as_file(self) -> Iterator[Path]:
        """A file of these rows for as long as it is read: what is decided before the run has a folder."""
        with tempfile.TemporaryDirectory(prefix="erniekit-rows-") as folder:
            path = Path(folder) / self.name
            self._copy_to(path)
            yield path

    def _copy_to(self, path: Path) -> None:
        self._text.seek(0)
        with path.open("wb") as file:
            shutil.copyfileobj(self._text, file)

    def write(self, folder: Path) -> Path:
        """The file; one that is there already is kept."""
        path, owned = folder / self.name, OwnedFiles(folder)
        owned.claim_content({self.name: Content(self.size, self.sha256)}, ROWS)
        if not path.is_file():
            part = folder / f".{self.name}.{os.getpid()}.part"
            self._copy_to(part)
            os.replace(part, path)
        return path


def _rows(given: Any, argument: str) -> Iterable[Any]:
    if hasattr(given, "columns") and hasattr(given, "to_dict") and not isinstance(given, Mapping):  # a pandas DataFrame
        given = given.to_dict("records")
    if isinstance(given, Mapping):  # a DatasetDict is one, too
        names = ", ".join(map(str, list(given)[:4]))
        raise DataError(
            f"{argument} is one mapping with {names}, not rows",
            where=argument,
            fix=f"a list of dicts; of a DatasetDict one part: {argument}=parts['train']",
        )
    try:
        return iter(given)
    except TypeError:
        raise DataError(
            f"{argument} is {type(given).__name__}, which holds no rows",
            where=argument,
            fix="a list of dicts, a Hugging Face Dataset, an iterable of dicts, or the path of a file",
        ) from None


def _line(row: Any, where: str) -> bytes:
    if not isinstance(row, Mapping):
        raise DataError(
            f"a row is {type(row).__name__}, not a dict: {str(row)[:SHOWN]}",
            where=where,
            fix='rows are dicts, such as {"messages": [{"role": "user", "content": "..."}, ...]}',
        )
    try:
        plain = {field: None if _is_missing(value) else value for field, value in row.items()}
        return (json.dumps(plain, ensure_ascii=False, allow_nan=False, default=_plain) + "\n").encode("utf-8")
    except UnicodeEncodeError as error:
        why = f"text holds half of a character (a lone surrogate) at {error.start}"
    except RecursionError:
        why = "it refers to itself, or is nested too deeply"
    except (TypeError, ValueError) as error:
        why = str(error)
    raise DataError(
        f"a row cannot be written as JSON: {why}", where=where, fix="use text, numbers, lists and dicts in rows"
    )


def _is_missing(value: Any) -> bool:
    """pandas has NaN, NaT or NA in empty cells; a row without a field it needs is then a bad row like any other."""
    return type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value)


def _plain(value: Any) -> Any:
    """Values of numpy and of Arrow's rows."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not text, a number, a list or a dict: {str(value)[:SHOWN]}")
