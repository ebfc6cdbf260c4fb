"""A video's header and frames, by PyAV."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from erniekit.data.media.extra import not_installed
from erniekit.data.media.limits import MediaError, MediaLimits, because

Beat = Callable[[], None]
# Files that hold a video themselves. Playlists and scripts, which name other files and servers, are none of them.
_SAFE = {
    "format_whitelist": "mov,mp4,matroska,webm,avi,gif,apng,mpegts,mpeg,mpegvideo,flv,asf,ogg,h264,hevc,ivf,m4v,rm,3gp",
    "protocol_whitelist": "none",
}
_NEAR = 10  # a frame that cannot be decoded is replaced by the one before it, if it is no further away


@dataclass(frozen=True)
class VideoHeader:
    width: int
    height: int
    frames: int
    rate: float  # frames a second, averaged

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


@contextmanager
def _opened(content: bytes, name: str) -> Any:
    try:
        import av
    except ImportError:
        raise not_installed("PyAV", "reading videos") from None
    try:
        with av.open(io.BytesIO(content), mode="r", metadata_errors="ignore", options=dict(_SAFE)) as container:
            if not container.streams.video:
                raise MediaError("bad_video", f"{name}: holds no video")
            yield container, container.streams.video[0]
    except MediaError:
        raise
    except (av.FFmpegError, ValueError, MemoryError, OSError) as error:
        raise MediaError("bad_video", because(f"{name}: no video that can be read", error)) from None


def read_header(content: bytes, name: str, limits: MediaLimits, beat: Beat = lambda: None) -> VideoHeader:
    """Nothing is decoded. Frames are counted where the file does not have their number."""
    with _opened(content, name) as (container, stream):
        width, height = stream.codec_context.width, stream.codec_context.height
        if not width or not height:
            raise MediaError("bad_video", f"{name}: its header gives no size")
        if width * height > limits.pixels:
            raise MediaError(
                "too_many_pixels", f"{name}: {width:,} x {height:,}, more than media_max_pixels={limits.pixels:,}"
            )
        frames = stream.frames or _count(container, stream, name, limits, beat)
        rate = float(stream.average_rate or stream.base_rate or 0)
        if frames > limits.frames:
            raise MediaError("too_many_frames", f"{name}: more than media_max_frames={limits.frames:,} frames")
        if not frames or rate <= 0:
            raise MediaError("bad_video", f"{name}: its header gives no frames or no rate")
        if frames / rate > limits.seconds:
            raise MediaError(
                "too_long_video",
                f"{name}: plays {frames / rate:,.0f} s, more than media_max_seconds={limits.seconds:g}",
            )
        return VideoHeader(width, height, frames, rate)


def _count(container: Any, stream: Any, name: str, limits: MediaLimits, beat: Beat) -> int:
    count = 0
    for packet in container.demux(stream):
        count += packet.size > 0
        beat()
        if count > limits.frames:
            raise MediaError("too_many_frames", f"{name}: more than media_max_frames={limits.frames:,} frames")
    return count


def read_frames(content: bytes, name: str, wanted: Sequence[int], beat: Beat = lambda: None) -> Iterator[np.ndarray]:
    """RGB, uint8 [height, width, 3] each; `wanted` are indices in ascending order and may repeat."""
    left, last, place = deque(wanted), None, -1
    with _opened(content, name) as (container, stream):
        stream.thread_type = "NONE"  # pictures are read by as many processes as there are cores
        for place, frame in enumerate(container.decode(stream)):
            beat()
            last = frame
            if place == left[0]:
                yield from _repeated(frame, left, place)
            if not left:
                return
        if last is None or left[-1] - place > _NEAR:
            raise MediaError("bad_video", f"{name}: frame {left[-1]} cannot be decoded; the last is {place}")
        yield from _repeated(last, left, left[-1])


def _repeated(frame: Any, left: deque[int], end: int) -> Iterator[np.ndarray]:
    """The frame for each index up to `end`, which are taken off `left`."""
    pixels = frame.to_ndarray(format="rgb24")
    while left and left[0] <= end:
        left.popleft()
        yield pixels.copy()  # time stamps are drawn into it
