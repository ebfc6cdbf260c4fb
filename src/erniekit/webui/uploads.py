"""Uploads that are kept: data files and recipes, in folders of the page; no file is ever replaced.

Called by pages/recipe_source.py with files that gradio has received into its temporary folder; their names
come from browsers.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from erniekit.errors import DataError
from erniekit.webui.limits import MAX_FILE
from erniekit.webui.private_files import create, private_folder

HOME = "erniekit-webui"  # the page's own folder, in the first root
DATA, RECIPES = "data", "recipes"  # folders in it
SUFFIXES = {
    DATA: (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet", ".csv", ".txt"),
    RECIPES: (".yaml", ".yml", ".json"),
}
MAX_KEPT = 4 * 2**30  # bytes of all uploads of a kind
MAX_FILES = 1000
MAX_NAME = 200  # bytes of a name: a number may follow
_UNSAFE = re.compile(r"[^\w.-]+")


def received(file: str) -> Path:
    """The real path of an upload; anything else that a browser names is refused."""
    real = Path(os.path.realpath(file))
    if Path(os.path.realpath(os.environ.get("GRADIO_TEMP_DIR", os.devnull))) not in real.parents:
        raise DataError("this file was not uploaded", where=Path(file).name[:80], fix="choose it again")
    return real


def keep(file: str, kind: str, root: Path) -> Path:
    """Copy an upload into `root`/`kind`, under its own name or, where that is taken, with a number after it."""
    source = received(file)
    name = _short(_UNSAFE.sub("-", source.name))
    suffix = next((s for s in sorted(SUFFIXES[kind], key=len, reverse=True) if name.lower().endswith(s)), "")
    if not suffix or len(name) <= len(suffix):
        raise DataError(f"{source.name[:80]} is not a file of this kind", where="upload", fix=" ".join(SUFFIXES[kind]))
    folder = private_folder(root / kind)
    _check_room(folder, source)
    stem = name[: -len(suffix)]
    for number in range(1, MAX_FILES + 1):
        path = folder / (name if number == 1 else f"{stem}-{number}{suffix}")
        try:
            with source.open("rb") as content, create(path) as out:  # never over what is there
                try:
                    shutil.copyfileobj(content, out)
                    out.flush()
                except OSError:  # a part of a file would be offered as if it were whole
                    path.unlink()
                    raise
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise DataError(f"the upload could not be kept: {error.strerror}", where=str(path), fix="") from None
    raise DataError(f"{MAX_FILES} files are called like that", where=str(folder), fix="choose another name")


def _short(name: str) -> str:
    """The end of a name, with its suffix, in at most MAX_NAME bytes; neither hidden nor like an option."""
    cut = os.fsencode(name)[-MAX_NAME:].decode("utf-8", errors="ignore")
    return cut.strip(".-")


def _check_room(folder: Path, source: Path) -> None:
    try:
        size = source.stat().st_size
    except OSError:
        raise DataError("the upload is gone", where=source.name, fix="upload it again") from None
    if size > MAX_FILE:
        raise DataError(
            f"the file has {size:,} bytes", where=source.name, fix=f"at most {MAX_FILE:,}; put larger ones into a root"
        )
    kept = [entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder)]
    if len(kept) >= MAX_FILES or sum(kept) + size > MAX_KEPT:
        raise DataError("the folder of uploads is full", where=str(folder), fix="remove files from it")
