"""Media folders: where the pictures and videos that rows name may lie. Anywhere, unless the program that started this
one says otherwise: the web page keeps its jobs to its roots. Used by data/media/place.py and webui/paths.py.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDERS_VARIABLE = "ERNIEKIT_MEDIA_FOLDERS"


def may_be_read(path: str) -> bool:
    """Links followed."""
    folders = os.environ.get(FOLDERS_VARIABLE, "")
    if not folders:
        return True
    real = Path(os.path.realpath(path))
    return any(Path(os.path.realpath(folder)) in real.parents for folder in folders.split(os.pathsep))
