"""Where a server answers: said on the screen, and written to a file for the program that started it.

The file is for the web page: a line of a log can be made by whoever names a model or an adapter. Used by server.py and
engines/started.py.
"""

from __future__ import annotations

import os
from pathlib import Path

from erniekit.log import say

ADDRESS_VARIABLE = "ERNIEKIT_ADDRESS_FILE"  # the name of webui/jobs.py as well


def announce(url: str, about: str) -> None:
    if file := os.environ.get(ADDRESS_VARIABLE):
        part = Path(f"{file}.part")
        part.write_text(url + "\n", encoding="ascii")
        part.replace(file)
    say(f"ready: {url} ({about})")
