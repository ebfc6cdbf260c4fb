"""How a row's media are laid out: sizes, frames and time stamps, from headers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from erniekit.data.media.decode import MediaHeader, Medium, ReadHeader
from erniekit.data.media.frames import FrameRules, even, frame_indices
from erniekit.data.media.limits import MediaError, MediaLimits
from erniekit.data.media.sizes import fitted
from erniekit.data.media.worker import MediaPool
from erniekit.data.vision.positions import merged
from erniekit.data.vision.rules import VisionRules
from erniekit.data.vision.vision_row import GivenMedium

HeaderOf = Callable[[GivenMedium, int], MediaHeader]  # the header of one of a medium's sources


def headers_from(pool: MediaPool, limits: MediaLimits) -> HeaderOf:
    """Headers are read in a process of the pool, within these limits."""

    def header_of(given: GivenMedium, index: int) -> MediaHeader:
        place = given.sources[index]
        work = ReadHeader(place, given.video and not given.stamps, limits)
        header: MediaHeader = pool.run(work, place.name, limits)
        return header

    return header_of


@dataclass(frozen=True)
class SeenMedium:
    medium: Medium
    size: tuple[int, int]  # width and height that the grid was made for

    @property
    def video(self) -> bool:
        return self.medium.video


def seen(given: Sequence[GivenMedium], rules: VisionRules, header_of: HeaderOf) -> list[SeenMedium]:
    out = []
    frames = rules.frames
    for one in given:
        if one.video and len(one.sources) == 1 and not one.stamps:
            made, chosen = _video(one, rules, frames, header_of)
            if rules.compat:  # a clamp of the first video decides the next
                frames = chosen
        elif one.video:
            made = _frames(one, rules, header_of)
        else:
            made = _picture(one, rules, header_of)
        out.append(made)
    return out


def tokens_of(medium: Medium, rules: VisionRules) -> int:
    t, h, w = merged(medium.grid, rules.merge, rules.temporal if medium.video else 1)
    return t * h * w


def _picture(given: GivenMedium, rules: VisionRules, header_of: HeaderOf) -> SeenMedium:
    header = header_of(given, 0)
    _refuse_several(header, given.sources[0].name, rules)
    size = given.declared or _size(header, rules)
    grid = (1, *grid_of(size, rules, rules.min_pixels, rules.max_pixels, given.sources[0].name))
    medium = Medium(given.sources, grid, upright=rules.upright, patch=rules.patch, merge=rules.merge)
    return SeenMedium(replace(medium, digests=(header.digest,)), size)


def _refuse_several(header: MediaHeader, name: str, rules: VisionRules) -> None:
    """ERNIEKit takes the first."""
    if header.animated and not rules.compat:
        raise MediaError("animated", f"{name}: an animated picture; give it as a video")
    if header.pages and not rules.compat:
        raise MediaError("pages", f"{name}: a TIFF of several pages; give each as a picture of its own")


def _size(header: MediaHeader, rules: VisionRules) -> tuple[int, int]:
    size = header.width, header.height
    return size[::-1] if header.turned and rules.upright else size


def grid_of(size: tuple[int, int], rules: VisionRules, least: int, most: int, name: str) -> tuple[int, int]:
    try:
        high, wide = fitted(size[1], size[0], least, most, rules.patch * rules.merge, squeeze=rules.compat)
    except MediaError as error:
        raise MediaError(error.kind, f"{name}: {error.reason}") from None
    return high // rules.patch, wide // rules.patch


def _video(
    given: GivenMedium, rules: VisionRules, frames: FrameRules, header_of: HeaderOf
) -> tuple[SeenMedium, FrameRules]:
    header = header_of(given, 0)
    name = given.sources[0].name
    chosen = frames.for_video(header.frames / header.rate)
    if given.frames:
        indices = list(given.frames)
        if indices[-1] >= header.frames:
            raise MediaError("frames", f"{name}: the row requests frame {indices[-1]} of {header.frames}")
    else:
        seed = rules.seed ^ int(header.digest[:8], 16)  # of `rand`: the same for a video wherever it is met
        indices = frame_indices(header.frames, header.rate, chosen, seed)
    if not indices:
        raise MediaError("frames", f"{name}: too short for one frame at video_fps={frames.fps:g}")
    indices = even(indices, rules.temporal)
    size = given.declared or (header.width, header.height)
    grid = (len(indices), *grid_of(size, rules, rules.video_min_pixels, rules.video_max_pixels, name))
    duration = header.frames / header.rate
    stamps = tuple(index * duration / header.frames for index in indices) if rules.render_timestamp else ()
    medium = Medium(given.sources, grid, True, tuple(indices), stamps, False, rules.patch, rules.merge)
    return SeenMedium(replace(medium, digests=(header.digest,)), size), chosen


def _frames(given: GivenMedium, rules: VisionRules, header_of: HeaderOf) -> SeenMedium:
    """Frames that a row gives as pictures."""
    order = even(range(len(given.sources)), rules.temporal)
    headers = [header_of(given, i) for i in range(len(given.sources))]
    for place, header in zip(given.sources, headers):
        _refuse_several(header, place.name, rules)
    size = given.declared or _size(headers[0], rules)
    name = given.sources[0].name
    if not given.declared and any(_size(header, rules) != size for header in headers):
        raise MediaError("frames", f"{name}: the frames of one video differ in size")
    grid = (len(order), *grid_of(size, rules, rules.video_min_pixels, rules.video_max_pixels, name))
    stamps = tuple(given.stamps[i] for i in order) if rules.render_timestamp and given.stamps else ()
    medium = Medium(
        tuple(given.sources[i] for i in order), grid, True, (), stamps, rules.upright, rules.patch, rules.merge
    )
    return SeenMedium(replace(medium, digests=tuple(headers[i].digest for i in order)), size)
