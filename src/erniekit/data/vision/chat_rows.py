"""`messages` rows with OpenAI's image and video parts, or with `<image>` and `<video>` in the text and lists beside it.

Called by the vision job, and by servers for the messages of a request. Everything but the media is read by the
messages format, so roles, labels and thoughts follow one set of rules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from erniekit.data.formats.fields import BadRow, holds, named
from erniekit.data.formats.message import MessageReader
from erniekit.data.formats.messages import read_messages
from erniekit.data.media.limits import MediaError
from erniekit.data.media.place import MediaPlace, from_base64, is_data_url, located
from erniekit.data.types import ChatMessage
from erniekit.data.vision.vision_row import GivenMedium, VisionRow, mark, media_in, refuse_marks

_TAGS = re.compile("<(image|video)>")
_SOUND = ("audio", "audio_url", "input_audio")
_LISTS = {"image": ("images", "image"), "video": ("videos", "video")}


class ChatMedia:
    """The media of one row, numbered as its messages meet them."""

    def __init__(self, folder: Path | None) -> None:
        """folder: where relative paths start; None: nothing but `data:` URLs is opened."""
        self.folder = folder
        self.found: list[GivenMedium] = []

    def plain(self, content: Any, field: str) -> Any:
        """The content with a text mark in the place of each picture or video."""
        if isinstance(content, str):
            return refuse_marks(content, field)
        if not isinstance(content, list):
            return content
        return [self._part(part, f"{field}[{i}]") for i, part in enumerate(content)]

    def _part(self, part: Any, field: str) -> Any:
        if not isinstance(part, dict):
            return part
        kind = part.get("type", "text")
        if kind == "text" and isinstance(part.get("text"), str):
            refuse_marks(part["text"], field)
        if kind in _SOUND:
            raise BadRow("not_text", f"`{field}` is a part of type {kind}: text, pictures and videos are read")
        if kind not in ("image", "image_url", "video", "video_url"):
            return part
        return {"type": "text", "text": self.add(part, kind.removesuffix("_url") == "video", field)}

    def add(self, given: Any, video: bool, field: str) -> str:
        """given: a URL or path, or a part that holds one. Its mark."""
        inline, url = None, given
        if isinstance(given, dict):
            word = "video" if video else "image"
            inline = given.get("base64") or given.get(f"{word}_base64")
            url = next((given[k] for k in (f"{word}_url", word, "url", "path") if given.get(k) is not None), None)
            if isinstance(url, dict):
                url = url.get("url")
        if isinstance(url, list) and video:
            places, stamps = self._frames(url, given, field)
            return self._keep(GivenMedium(places, True, stamps))
        if inline is None and not isinstance(url, str):
            raise BadRow("wrong_type", f"`{field}` names no file: {named(url)}")
        return self._keep(GivenMedium((self._place(inline or url, inline is not None, field),), video))

    def _frames(self, urls: list[Any], given: Any, field: str) -> tuple[tuple[MediaPlace, ...], tuple[float, ...]]:
        if not urls:
            raise BadRow("missing_media", f"`{field}` is a video without a frame: the list is empty")
        if not all(isinstance(url, str) for url in urls):
            raise BadRow("wrong_type", f"`{field}` must be a list of pictures")
        fps = given.get("fps", 2.0) if isinstance(given, dict) else 2.0
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
            given = f"{fps:g}" if isinstance(fps, int | float) and not isinstance(fps, bool) else named(fps)
            raise BadRow("wrong_type", f"`{field}.fps` must be a number above 0, not {given}")
        return tuple(self._place(url, False, field) for url in urls), tuple(i / fps for i in range(len(urls)))

    def _place(self, url: str, inline: bool, field: str) -> MediaPlace:
        try:
            if self.folder is None and not inline and not is_data_url(url):
                raise MediaError("remote", f"{url[:80]}: only data: URLs are read here")
            found = from_base64(url) if inline else located(url, self.folder or Path())
        except MediaError as error:
            raise BadRow(error.kind, f"`{field}`: {error.reason}") from None
        return found if isinstance(found, MediaPlace) else MediaPlace(content=found, label=field)

    def _keep(self, medium: GivenMedium) -> str:
        self.found.append(medium)
        return mark(len(self.found) - 1)


def read_chat_row(row: Any, folder: Path, compat: bool) -> VisionRow:
    row = {"messages": row} if isinstance(row, list) else dict(row)
    refuse_tools(row)
    media = ChatMedia(folder)
    if isinstance(row.get("messages"), list):
        row["messages"] = [
            {**item, "content": media.plain(item.get("content"), f"messages[{i}].content")}
            if isinstance(item, dict)
            else item
            for i, item in enumerate(row["messages"])
        ]
    replace_tags(row, media)
    said, unused = read_messages(row, compat)
    _refuse_media_elsewhere(said)
    return VisionRow(said, tuple(media.found), unused)


def read_prompt(messages: Sequence[Any], folder: Path | None = None) -> VisionRow:
    """The messages of a request, up to the user's. folder: as ChatMedia's; a server gives none."""
    media, reader = ChatMedia(folder), MessageReader(False)
    said = []
    for i, item in enumerate(messages):
        field = f"messages[{i}]"
        if isinstance(item, dict):
            item = {**item, "content": media.plain(item.get("content"), f"{field}.content")}
        said.append(reader.read(item, field, i))
    if not said or said[-1].role != "user":
        raise BadRow("role_order", "the last message must be the user's")
    _refuse_media_elsewhere(said)
    return VisionRow(tuple(said), tuple(media.found), reader.unused)


def refuse_tools(row: Mapping[str, Any]) -> None:
    if holds(row.get("tools")):
        raise BadRow("tools", "the row has `tools`, which the template of models that see does not render")


def refuse_calls(said: Sequence[ChatMessage]) -> None:
    if any(message.role == "tool" or message.tool_calls for message in said):
        raise BadRow("tools", "tool calls beside pictures are not supported")


def _refuse_media_elsewhere(said: Sequence[ChatMessage]) -> None:
    refuse_calls(said)
    for i, message in enumerate(said):
        if message.role != "user" and media_in(message):
            raise BadRow("media_in_answer", f"`messages[{i}]` is from {message.role} and holds a picture")


def replace_tags(
    row: dict[str, Any], media: ChatMedia, fields: Sequence[str] = ("messages",), bare: Sequence[str] = ()
) -> None:
    """`images` and `videos` of the row fill the tags in its texts, in order; a tag that stays would be learnt as text.
    fields: whose texts or messages may hold some. bare: whose may not."""
    lists: dict[str, list[tuple[Any, str]]] = {}
    for word, names in _LISTS.items():
        name = next((n for n in names if row.get(n)), None)
        value = row.pop(name) if name else []
        lists[word] = [(item, f"{name}[{i}]") for i, item in enumerate(value if isinstance(value, list) else [value])]

    def fill(found: re.Match[str]) -> str:
        word = found[1]
        if not lists[word]:
            reason = f"there are more <{word}> in the text than {word}s in the row (`{word}s`)"
            raise BadRow("length_mismatch", reason)
        item, field = lists[word].pop(0)
        return media.add(item, word == "video", field)

    for field in fields:
        row[field] = _each_text(row.get(field), lambda text: _TAGS.sub(fill, text))
        if row[field] is None:
            del row[field]
    left = [field for items in lists.values() for _, field in items]
    if left:
        raise BadRow("length_mismatch", f"`{left[0]}` has no tag in the text")
    for field in bare:
        _each_text(row.get(field), partial(_refuse_tags, field=field))


def _refuse_tags(text: str, field: str) -> str:
    if found := _TAGS.search(text):
        raise BadRow("media_in_answer", f"`{field}` holds {found[0]}: pictures belong in the question")
    return text


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Of a text, of messages, or of the parts of one, each text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_each_text(item, change) for item in value]
    if isinstance(value, dict):
        return {key: _each_text(item, change) if key in ("content", "text") else item for key, item in value.items()}
    return value
