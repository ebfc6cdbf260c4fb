"""Text files in a conversation in the terminal: read whole, and put into the next question between fences.

Used by chat_session.py and chat_commands.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from erniekit.errors import DataError
from erniekit.files import refuse_special
from erniekit.printable import counted

MAX_FILE_BYTES = 2**20  # of text put into one message: far beyond what most contexts hold


@dataclass(frozen=True)
class TextFile:
    """A file for the next question."""

    path: Path
    text: str

    def __str__(self) -> str:
        lines = self.text.count("\n") + (not self.text.endswith("\n"))
        return f"file {self.path.name} ({counted(lines, 'line')}, {counted(len(self.text), 'character')})"

    @property
    def block(self) -> str:
        """Between fences that are longer than any in the file."""
        fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", self.text)), default=0))
        return f"{self.path.name}:\n{fence}\n{self.text.rstrip()}\n{fence}\n"


def read_text_file(path: str) -> TextFile:
    file = Path(path).expanduser()
    refuse_special(file, DataError)
    try:
        size = file.stat().st_size
        if size > MAX_FILE_BYTES:
            raise DataError(f"{size:,} bytes are too many", where=str(file), fix=f"at most {MAX_FILE_BYTES:,}")
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(
            f"the file cannot be read: {error.strerror or error}", where=str(file), fix="check the path"
        ) from None
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise DataError("it is not UTF-8 text", where=str(file), fix="convert it; /image PATH shows a picture")
    if not text.strip():
        raise DataError("it is empty", where=str(file), fix="name a file with text in it")
    return TextFile(file, text)
