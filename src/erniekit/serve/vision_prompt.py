"""Pictures and videos of a request: which parts are taken, and a read prompt as the engine takes it.

request_parsing.py checks the parts of messages here, before a byte is decoded; media_work.py reads them.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from erniekit.data.media.decode import Medium
from erniekit.data.media.place import is_data_url
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.vision.layout import tokens_of
from erniekit.data.vision.rules import VisionRules, VisionTokens
from erniekit.data.vision.tokens import VisionPrompt
from erniekit.errors import DataError
from erniekit.printable import counted
from erniekit.serve.engines.vision_input import PromptMedium, PromptVision
from erniekit.serve.prompt_worker import Failed
from erniekit.serve.request_error import RequestError

KINDS = {"image_url": "image", "video_url": "video"}  # of parts
MOST = {"image": 16, "video": 1}  # of one request, where limit_mm_per_prompt sets none
SHOWN = 80  # characters of a URL


@dataclass(frozen=True)
class VisionSettings:
    """How a served model reads images and videos."""

    rules: VisionRules
    most: Mapping[str, int] = field(default_factory=lambda: dict(MOST))  # images and videos of one request
    enabled: bool = True


@dataclass(frozen=True)
class VisionChat:
    """The messages of a request to a vision-language model; media: whether there are any."""

    messages: list[dict[str, Any]]
    thinking: bool | None
    media: bool


# What to do, by the kind of a MediaError or BadRow.
FIXES = {
    "animated": "send it as video_url, or one frame of it as PNG",
    "bad_base64": "send data:image/png;base64, followed by the whole file in base64",
    "bad_data_url": "send data:image/png;base64, followed by the whole file in base64",
    "bad_media": "save it again, a picture as PNG and a video as MP4, and send that",
    "bad_picture": "send PNG, JPEG or WebP, whole; a video is a video_url",
    "bad_text": "send the text without these characters",
    "bad_video": "send the video whole, as MP4, WebM or MKV; a picture is an image_url",
    "decoder_died": "save it again, a picture as PNG and a video as MP4, and send that",
    "empty_media": "send the content of the file in base64 after the comma",
    "frames": "send a longer video",
    "media_in_answer": "put the picture or video into a message of the user",
    "role_order": "let the last message be the user's",
    "strip": "cut it into pieces that are less long",
    "timeout": "send it smaller or shorter, or retry when the server is less busy",
    "too_long_video": "send a part of it",
    "too_many_bytes": "send a smaller file",
    "too_many_frames": "send a part of it, or the video in a smaller size",
    "too_many_pixels": "send it scaled down, or fewer at a time",
    "too_much_memory": "send it scaled down",
    "two_systems": "send one system message",
}
_PLACE = re.compile(r"`?(messages\[\d+\](?:\.\w+|\[\d+\])*)`?(: )?")


def media_error(what: str, where: str, fix: str) -> RequestError:
    """What, where and what to do, a line each."""
    return RequestError(400, str(DataError(what, where=where, fix=fix)), param="messages", code="invalid_media")


def media_refused(failed: Failed) -> RequestError:
    """Of media that cannot be used: the place is in front of the reason, or known to the client."""
    what, where = failed.message, failed.where or "messages"
    if found := _PLACE.match(what):
        where, what = found[1], what[found.end() :] if found[2] else what
    if failed.code == "bad_media":  # a decoder's own message
        what = "its data cannot be decoded"
    return media_error(what, where, FIXES.get(failed.code, "see the documentation of messages with pictures"))


def check_parts(messages: Sequence[Any], name: str, settings: VisionSettings | None) -> bool:
    """Whether the messages show anything; a RequestError where a part cannot be taken. Nothing is decoded.

    messages: of the schema, whose content may be a list of parts.
    """
    counts: Counter[str] = Counter()
    for i, message in enumerate(messages):
        for k, part in enumerate(message.content if isinstance(message.content, list) else ()):
            kind, where = KINDS.get(part["type"]), f"messages[{i}].content[{k}]"
            if kind is None:
                if part["type"] == "text" and part.get("text") is None:
                    raise RequestError(400, f"{where}.text is missing", param=f"{where}.text")
                if part["type"] != "text":
                    takes = "text" if settings is None else "text, image_url and video_url"
                    raise RequestError(
                        400, f"a message part of type {part['type']!r} is not supported: this model takes {takes}",
                        param="messages",
                    )  # fmt: skip
                continue
            _check_medium(part, kind, where, name, settings)
            counts[kind] += 1
    for kind, count in counts.items():
        assert settings is not None
        most = settings.most.get(kind, MOST[kind])
        if count > most:
            raise media_error(
                f"the request has {counted(count, kind)}; the limit is {most}",
                "messages",
                f"send fewer, or start the server with limit_mm_per_prompt={{{kind}: {count}}}",
            )
    return bool(counts)


def _check_medium(part: Mapping[str, Any], kind: str, where: str, name: str, settings: VisionSettings | None) -> None:
    if settings is None:
        raise media_error(f"{name} takes text only, no {kind}s", where, "use a vision-language model")
    if not settings.enabled:
        raise media_error(f"{name} is served without {kind}s (enable_mm is False)", where, "send text only")
    given = part.get(f"{kind}_url")
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str) or not url.strip():
        raise media_error(f"the part names no {kind}", where, f'write "{kind}_url": {{"url": "data:..."}}')
    if not is_data_url(url):
        shown = url if len(url) <= SHOWN else url[:SHOWN] + "..."
        fix = f"send the {kind} itself: data:{kind}/...;base64,..."
        raise media_error(f"{shown} is not opened: this server reads data: URLs only", f"{where}.{kind}_url", fix)


def medium_key(medium: Medium) -> str:
    """What determines a medium's features: its bytes, and every choice made about them."""
    m = medium
    inputs = m.digests, m.grid, m.video, m.frames, m.stamps, m.upright, m.patch, m.merge
    return hashlib.blake2b(repr(inputs).encode(), digest_size=16).hexdigest()


def prompt_vision(
    prompt: VisionPrompt,
    patches: Sequence[np.ndarray | None],
    tokenizer: Tokenizer,
    rules: VisionRules,
    known: Sequence[tuple[Any, ...]] | None = None,
) -> PromptVision:
    """patches: of each medium; None where its features are known."""
    media = prompt.media
    found = known or [()] * len(patches)
    return PromptVision(
        media.positions,
        media.modality,
        np.flatnonzero(prompt.ids == VisionTokens.of(tokenizer).placeholder),
        prompt.next_position,
        tuple(
            PromptMedium(medium_key(m), m.grid, tokens_of(m, rules), pixels, kept)
            for m, pixels, kept in zip(media.sources, patches, found)
        ),
    )
