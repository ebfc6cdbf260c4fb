"""A folder of links: where its files really lie. Used by whatever replaces files, before it does."""

from __future__ import annotations

import os
from pathlib import Path


def file_inside(folder: Path, target: Path) -> Path | None:
    """A link in `folder` that leads into `target`: replacing what is there would replace it."""
    real = Path(os.path.realpath(target))
    try:
        names = sorted(os.listdir(folder))
    except OSError:  # no folder, or one that is refused where it is read
        return None
    links = (folder / name for name in names if (folder / name).is_symlink())
    return next((link for link in links if Path(os.path.realpath(link)).is_relative_to(real)), None)
