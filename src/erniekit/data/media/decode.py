"""The work of the worker processes: a header, a check that everything decodes, or the patches of a medium."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from erniekit.data.media import picture, video
from erniekit.data.media.limits import MediaError, MediaLimits
from erniekit.data.media.patches import to_patches
from erniekit.data.media.place import MediaPlace, read
from erniekit.data.media.stamp import draw_stamp

Beat = Callable[[], None]


@dataclass(frozen=True)
class MediaHeader:
    """What is known without decoding. `frames` is 0 for a picture."""

    width: int
    height: int
    digest: str  # of the bytes
    frames: int = 0
    rate: float = 0.0
    animated: bool = False
    turned: bool = False  # EXIF swaps width and height
    pages: bool = False  # a document of several


@dataclass(frozen=True)
class Medium:
    """One picture or video of a sample, with every choice made about it: what a batch needs to get its patches."""

    places: tuple[MediaPlace, ...]  # one; of a video given as pictures, one per frame
    grid: tuple[int, int, int]  # t, h, w in patches
    video: bool = False
    frames: tuple[int, ...] = ()  # which ones of a video file
    stamps: tuple[float, ...] = ()  # seconds to draw into each frame; none: nothing is drawn
    upright: bool = True
    patch: int = 14
    merge: int = 2
    digests: tuple[str, ...] = ()  # of the bytes of `places`, as they were when the sample was made
    origin: str = ""  # file:line of its row, for messages

    def to_json(self) -> dict[str, Any]:
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        out["places"] = [place.to_json() for place in self.places]
        del out["origin"]
        return out

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Medium:
        tuples = {key: tuple(value) for key, value in values.items() if isinstance(value, list) and key != "places"}
        return cls(**{**values, **tuples, "places": tuple(map(MediaPlace.from_json, values["places"]))})


def digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@dataclass(frozen=True)
class ReadHeader:
    place: MediaPlace
    video: bool
    limits: MediaLimits

    def work(self, beat: Beat) -> MediaHeader:
        content, name = read(self.place, self.limits), self.place.name
        digest = digest_of(content)
        if self.video:
            v = video.read_header(content, name, self.limits, beat)
            return MediaHeader(v.width, v.height, digest, v.frames, v.rate)
        p = picture.read_header(content, name, self.limits)
        return MediaHeader(p.width, p.height, digest, animated=p.animated, turned=p.turned, pages=p.pages)


@dataclass(frozen=True)
class ReadPatches:
    """check: whether it decodes; nothing is resized and nothing returned."""

    medium: Medium
    limits: MediaLimits
    check: bool = False

    def work(self, beat: Beat) -> np.ndarray | None:
        medium, frames = self.medium, self._frames(beat)
        if self.check:
            for _ in frames:
                beat()
            return None
        out = np.empty((medium.grid[0], *self._size()[::-1], 3), np.uint8)
        for i, frame in enumerate(frames):
            out[i] = self._resized(self._stamped(frame, i))
            beat()
        return to_patches(out, medium.patch, medium.merge)

    def stages(self) -> dict[str, list[np.ndarray]]:
        """The pixels after each step, for proof.py."""
        frames = list(self._frames(lambda: None))
        stamped = [self._stamped(frame.copy(), i) for i, frame in enumerate(frames)]
        return {
            "decode": [np.asarray(frame) for frame in frames],
            "time stamp": [np.asarray(frame) for frame in stamped],
            "resize": [self._resized(frame) for frame in stamped],
        }

    def _frames(self, beat: Beat) -> Iterator[Any]:
        """Pictures of Pillow, in RGB; one at a time, as hundreds of large frames would not fit the memory."""
        contents = self._contents(beat)
        if not self.medium.frames:
            yield from (self._frame(place, content) for place, content in contents)
            return
        from PIL import Image

        [(place, content)] = contents
        yield from map(Image.fromarray, video.read_frames(content, place.name, self.medium.frames, beat))

    def _size(self) -> tuple[int, int]:
        _, h, w = self.medium.grid
        return w * self.medium.patch, h * self.medium.patch

    def _stamped(self, frame: Any, index: int) -> Any:
        return draw_stamp(frame, self.medium.stamps[index]) if self.medium.stamps else frame

    def _resized(self, frame: Any) -> np.ndarray:
        return np.asarray(frame.resize(self._size(), resample=3))  # bicubic

    def _contents(self, beat: Beat) -> list[tuple[MediaPlace, bytes]]:
        out = []
        for i, place in enumerate(self.medium.places):
            content = read(place, self.limits)
            if self.medium.digests and digest_of(content) != self.medium.digests[i]:
                raise MediaError("changed_media", f"{place.name}: changed since it was tokenised")
            out.append((place, content))
            beat()
        return out

    def _frame(self, place: MediaPlace, content: bytes) -> Any:
        return picture.read_pixels(content, place.name, self.limits, self.medium.upright)
