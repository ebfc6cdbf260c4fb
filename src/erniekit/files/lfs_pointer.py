"""The text that git leaves in a large file's place until git-lfs downloads it. Refused by checkpoint/safe.py and
published.py, where it would else pass for damage."""

from __future__ import annotations

from pathlib import Path

from erniekit.errors import CheckpointError

_BEGINS = b"version https://git-lfs.github.com/spec/"
_LONGEST = 1024  # bytes, by its specification


def refuse_pointer(path: Path) -> None:
    if not path.is_file():  # opening a pipe would wait for ever
        return
    try:
        with path.open("rb") as file:
            text = file.read(_LONGEST + 1)
    except OSError:
        return
    if len(text) <= _LONGEST and text.startswith(_BEGINS):
        raise CheckpointError(
            f"{path.name} is a git-lfs pointer: the file itself was not downloaded",
            where=str(path),
            fix=f"git lfs install; then git lfs pull in {path.parent}",
        )
