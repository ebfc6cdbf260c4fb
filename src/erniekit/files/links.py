"""A folder of links: where its files really lie. Used by whatever replaces files, before it does."""

from __future__ import annotations

import os
from pathlib import Path


def file_inside(folder: Path, target: Path) -> Path | None:
    """A file of `folder` that lies in `target` once links are followed: replacing what is there would replace it."""
    real = Path(os.path.realpath(target))
    try:
        names = sorted(os.listdir(folder))
    except OSError:  # no folder, or one that is refused where it is read
        return None
    return next((folder / name for name in names if Path(os.path.realpath(folder / name)).is_relative_to(real)), None)
