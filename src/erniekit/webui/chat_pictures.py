"""Pictures and videos of a conversation on the page: uploads as parts of a message, and as the window shows them.

Used by pages/chat.py. A file is read when it is sent; its name comes from the browser, so nothing but uploads is read.
"""

from __future__ import annotations

import base64
import mimetypes
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from erniekit.errors import DataError
from erniekit.webui.uploads import received

# A fenced block (up to the end where it is still being written), or a span between as many backticks.
_CODE = re.compile(r"(^ {0,3}```.*?(?:^ {0,3}```|\Z)|(?<!`)`[^`\n]+`(?!`))", re.DOTALL | re.MULTILINE)
MAX_FILES = 16  # of one message
MAX_BYTES = 8 * 2**20  # of one file: it goes to the server inside the message
History = list[dict[str, Any]]


def part(file: str) -> dict[str, Any]:
    """OpenAI's part of an uploaded picture or video."""
    path, name = received(file), Path(file).name
    kind = mimetypes.guess_type(path.name)[0] or ""
    media_type = kind.partition("/")[0]
    if media_type not in ("image", "video"):
        raise DataError("neither a picture nor a video by its name", where=name, fix="choose another file")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError("the file is too large for a message", where=name, fix=f"at most {MAX_BYTES:,} bytes")
        content = path.read_bytes()
    except OSError:
        raise DataError(
            "the upload is gone: newer ones took its place", where=name, fix="clear, and upload it again"
        ) from None
    url = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    return {"type": f"{media_type}_url", f"{media_type}_url": {"url": url}}


def message(text: str, files: Sequence[str]) -> dict[str, Any]:
    """A user's turn as the page keeps it: `files` are uploads."""
    if len(files) > MAX_FILES:
        raise DataError(
            f"{len(files)} files are too many for one message", where="pictures", fix=f"at most {MAX_FILES}"
        )
    return {"role": "user", "content": text, **({"files": list(files)} if files else {})}


def as_request(turn: dict[str, Any]) -> dict[str, Any]:
    """The turn as the server takes it."""
    files = turn.get("files")
    if not files:
        return {"role": turn["role"], "content": turn["content"]}
    text = [{"type": "text", "text": turn["content"]}] if turn["content"] else []
    return {"role": turn["role"], "content": [*map(part, files), *text]}


def as_displayed(history: History) -> History:
    """What the chat window shows: each upload in a bubble before its text."""
    messages: History = []
    for turn in history:
        files = [file for file in turn.get("files", ()) if os.path.isfile(file)]
        messages += [{"role": turn["role"], "content": {"path": file}} for file in files]
        if turn["content"] or not files:
            shown = {name: value for name, value in turn.items() if name != "files"}
            messages.append({**shown, "content": safe_markdown(str(turn["content"]))})
    return messages


def safe_markdown(text: str) -> str:
    """Markdown without HTML: a tag is shown as it was written. Code is left alone, as markdown escapes it itself."""
    parts = _CODE.split(text)  # text and code by turns
    return "".join(part if at % 2 else part.replace("<", "&lt;") for at, part in enumerate(parts))
