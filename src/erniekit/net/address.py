"""A server's address: printed, and written to a file for the program that started it; and the variables of both.

The web page reads the file and not the log: the name of a model or an adapter could forge a line of the log. Used by
serve/server.py, serve/engines/external.py and webui/jobs.py.
"""

from __future__ import annotations

import os
from pathlib import Path

from erniekit.log import emit

ADDRESS_VARIABLE = "ERNIEKIT_ADDRESS_FILE"
KEY_VARIABLE = "ERNIEKIT_API_KEY"


def announce(url: str, about: str) -> None:
    if file := os.environ.get(ADDRESS_VARIABLE):
        part = Path(f"{file}.part")
        part.write_text(url + "\n", encoding="ascii")
        part.replace(file)
    emit(f"ready: {url} ({about})")
