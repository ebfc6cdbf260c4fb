"""One decoded row, of whatever format, as messages and media. Called by the vision job and `erniekit data`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from erniekit.data.formats import FORMATS
from erniekit.data.formats.fields import BadRow, holds, is_preference
from erniekit.data.vision.chat_rows import ChatMedia, read_chat_row, refuse_calls, refuse_tools, replace_tags
from erniekit.data.vision.rows import read_info_row
from erniekit.data.vision.vision_row import VisionRow

_TEXTS = ("system", "src", "tgt", "instruction", "input", "output", "history")  # of rows without pictures
_MEDIA = ("image", "images", "video", "videos")


def read_vision_row(row: Any, folder: Path, format: str, compat: bool) -> VisionRow:
    """BadRow where it cannot be read. Rows without pictures are read by the text formats. `folder` is where relative
    paths start."""
    if isinstance(row, dict) and is_preference(row):
        raise BadRow("preference", "the row holds two answers to compare: preference data needs `stage: DPO`")
    if isinstance(row, dict) and ("text_info" in row or "text_list" in row):
        return read_info_row(row, folder, compat)
    if isinstance(row, list) or (isinstance(row, dict) and "messages" in row):
        return read_chat_row(row, folder, False)
    if isinstance(row, dict):  # a file may hold rows of several formats
        format = "erniekit" if "src" in row else "alpaca" if "instruction" in row else format
        if not compat:
            _refuse_pictures(row)
        refuse_tools(row)
    said = FORMATS.get(format)(row, False)[0]
    refuse_calls(said.messages)
    return VisionRow(said.messages, (), said.unused)


def _refuse_pictures(row: dict[str, Any]) -> None:
    for field in _MEDIA:
        if holds(row.get(field)):
            raise BadRow("no_place", f"`{field}` is read in rows with `messages`, where <image> says its place")
    replace_tags(row, ChatMedia(None), _TEXTS)
