"""Pictures and videos for a question in the terminal: `/image PATH`, `/video PATH`, or `@PATH` in the text.

Used by chat.py. Files are read here and sent as `data:` URLs: a server opens no paths. Nothing is decoded here.
"""

from __future__ import annotations

import base64
import mimetypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from erniekit.data.media.limits import MediaError, MediaLimits
from erniekit.errors import DataError, ErnieKitError
from erniekit.files import refuse_special

MAX_BYTES = 24 * 2**20  # of one question: in base64 a third more, and servers end bodies at 32 MiB
COMMANDS = {"/image": "image", "/video": "video"}
# @ at the start of a word, then a path, in quotes if it holds blanks.
_NAMED = re.compile(r"""(?<!\S)@(?:"([^"]+)"|'([^']+)'|(\S+))""")


@dataclass(frozen=True)
class Attachment:
    kind: str  # image | video
    path: Path
    size: int  # bytes
    url: str

    @property
    def part(self) -> dict[str, Any]:
        return {"type": f"{self.kind}_url", f"{self.kind}_url": {"url": self.url}}

    def __str__(self) -> str:
        noun = "picture" if self.kind == "image" else "video"
        return f"{noun} {self.path.name} ({self.size:,} bytes)"


def attach(path: str, kind: str, pixels: int = MediaLimits.pixels) -> Attachment:
    """kind: image or video, or by its name where it is neither. pixels: most of a picture."""
    file = Path(path.strip().strip("\"'")).expanduser()
    guessed = mimetypes.guess_type(file.name)[0] or ""
    kind = kind or guessed.partition("/")[0]
    if kind not in ("image", "video"):
        raise DataError(
            f"{file.name} is neither a picture nor a video by its name",
            where=str(file),
            fix="use /image PATH or /video PATH",
        )
    refuse_special(file, DataError)
    try:
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise DataError(f"{size:,} bytes are too many to send", where=str(file), fix=f"at most {MAX_BYTES:,}")
        content = file.read_bytes()
    except OSError as error:
        raise DataError(
            f"the file cannot be read: {error.strerror or error}", where=str(file), fix="check the path"
        ) from None
    check(content, kind, file, pixels)
    type_ = guessed if guessed.startswith(f"{kind}/") else "image/png" if kind == "image" else "video/mp4"
    return Attachment(kind, file, len(content), f"data:{type_};base64,{base64.b64encode(content).decode()}")


# First bytes of files that hold a video, or at byte 4 of those that are made of boxes.
_VIDEOS = (
    b"\x1aE\xdf\xa3",
    b"FLV",
    b"G",
    b"\0\0\1",
    b"\0\0\0\1",
    b"OggS",
    b"0&\xb2u",
    b".RMF",
    b"DKIF",
    b"\x89PNG",
    b"GIF8",
)
_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip")
_PICTURE_BRANDS = (b"avif", b"avis", b"mif1", b"heic")


def is_video(content: bytes) -> bool:
    """By its first bytes. A GIF or PNG may play."""
    if content[4:8] in _BOXES:
        return content[8:12] not in _PICTURE_BRANDS
    return content.startswith(_VIDEOS) or (content.startswith(b"RIFF") and content[8:12] == b"AVI ")


def check(content: bytes, kind: str, file: Path, pixels: int) -> None:
    """Checks the header: a server would refuse a wrong file only after the question is sent."""
    if not content:
        raise DataError("the file is empty", where=str(file), fix="name another file")
    if kind == "video":
        if not is_video(content):
            fix = "send MP4, WebM, MKV, AVI or the like; a picture is shown by /image PATH, or --image"
            raise DataError("its first bytes are of no video", where=str(file), fix=fix)
        return
    if is_video(content) and not content.startswith((b"\x89PNG", b"GIF8")):
        raise DataError(
            "it is a video, not a picture", where=str(file), fix=f"show it as a video: /video {file}, or --video"
        )
    from erniekit.data.media.picture import read_header

    try:
        header = read_header(content, "", MediaLimits(pixels=pixels))
    except MediaError as error:
        large = error.kind == "too_many_pixels"
        fix = "scale it down" if large else "send PNG, JPEG, WebP or the like, whole"
        raise DataError(error.reason.removeprefix(": "), where=str(file), fix=fix) from None
    except ErnieKitError:  # no Pillow here: the server will report it
        return
    if header.animated:
        raise DataError("it is an animated picture", where=str(file), fix=f"/video {file}, or --video, shows all of it")


def command(line: str, pixels: int = MediaLimits.pixels) -> Attachment | None:
    """What `/image PATH` or `/video PATH` names; None: the line is a question."""
    name, _, path = line.strip().partition(" ")
    if name not in COMMANDS:
        return None
    if not path.strip():
        raise DataError(f"{name} needs a path", where=line.strip(), fix=f"{name} PATH")
    return attach(path, COMMANDS[name], pixels)


def named_in(text: str, pixels: int = MediaLimits.pixels) -> tuple[str, list[Attachment]]:
    """The text without each `@PATH` that names a picture or video that is there, and these."""
    found: list[Attachment] = []

    def take(match: re.Match[str]) -> str:
        path = next(group for group in match.groups() if group)
        guessed = (mimetypes.guess_type(path)[0] or "").partition("/")[0]
        if guessed not in ("image", "video") or not Path(path).expanduser().is_file():
            return match[0]  # a name like any other
        found.append(attach(path, guessed, pixels))
        return ""

    return _NAMED.sub(take, text).strip(), found


def content(text: str, attached: list[Attachment]) -> str | list[dict[str, Any]]:
    """Of the user's message: media come before the question."""
    if not attached:
        return text
    if sum(one.size for one in attached) > MAX_BYTES:
        raise DataError(
            f"{len(attached)} pictures and videos have more than {MAX_BYTES:,} bytes",
            where=", ".join(one.path.name for one in attached)[:200],
            fix="send fewer or smaller ones",
        )
    text_parts = [{"type": "text", "text": text}] if text else []
    return [*(one.part for one in attached), *text_parts]
