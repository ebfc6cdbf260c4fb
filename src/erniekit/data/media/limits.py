"""What a picture or video may cost, and the one way it is refused. Every file of data/media raises MediaError; the
token cache makes a bad row of it, with file and line."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.printable import error_text


def because(what: str, error: BaseException) -> str:
    """`what`, and in brackets the library's own message, where that is readable."""
    text = error_text(error)
    return f"{what} ({text})" if text else what


class MediaError(Exception):
    """`kind` is what reports count by; `reason` names the file and what is wrong with it."""

    def __init__(self, kind: str, reason: str) -> None:
        self.kind, self.reason = kind, reason
        super().__init__(kind, reason)

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class MediaLimits:
    """None of them changes a picture: what exceeds one is refused, from its header where that is enough."""

    pixels: int = 100_000_000  # of a picture or a frame as stored
    bytes: int = 512 << 20  # of a file, or of an archive's member unpacked
    frames: int = 200_000  # of a video as stored
    seconds: float = 4 * 3600.0  # that a video plays
    timeout: float = 8.0  # seconds of its own that the process that reads it may take without a sign of life
    total: float = 600.0  # seconds for one picture or video, whatever it reports


SIDES = 200  # ERNIEKit and transformers have the same limit: no side is more than this many times the other
