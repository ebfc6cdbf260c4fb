"""Videos made to fit a sequence: less resolution first, then fewer frames. For one_sample_in_one_seq."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from erniekit.data.media.limits import MediaError
from erniekit.data.vision.layout import SeenMedium, grid_of, tokens_of
from erniekit.data.vision.rules import VisionRules


def squeezed(media: Sequence[SeenMedium], space: int, rules: VisionRules) -> list[SeenMedium]:
    """Videos of fewer than `space` tokens in all, as far as two frames of each allow. A video smaller than
    video_min_pixels keeps its size here."""
    videos = [one for one in media if one.video]
    if not videos:
        return list(media)
    least = min(rules.video_min_pixels, *(one.size[0] * one.size[1] for one in videos), rules.video_max_pixels)
    rules = replace(rules, video_min_pixels=least)

    def at(most: int) -> list[SeenMedium]:
        return [_resized(one, rules, most) if one.video else one for one in media]

    def fits(those: Sequence[SeenMedium]) -> bool:
        return sum(tokens_of(one.medium, rules) for one in those if one.video) < space

    whole = at(rules.video_max_pixels)
    if fits(whole):
        return whole
    most = _most_pixels(least, rules.video_max_pixels, lambda pixels: fits(at(pixels)), rules.compat)
    while not rules.compat:
        try:
            at(most)
            break
        except MediaError:  # there is no size between these bounds
            most += 1
    out = at(most)
    if fits(out):
        return out
    return _fewer_frames(out, space, rules)


def _most_pixels(least: int, high: int, fits: Callable[[int], bool], compat: bool) -> int:
    """ERNIEKit stops its search where there is no size between the bounds, and loses the row if that is at once."""
    low, began = least, high
    while low < high:
        middle = (low + high + 1) // 2
        try:
            good = fits(middle)
        except MediaError:
            if compat and (low, high) == (least, began):
                raise
            if compat:
                return high
            good = False
        low, high = (middle, high) if good else (low, middle - 1)
    return low


def _resized(one: SeenMedium, rules: VisionRules, most: int) -> SeenMedium:
    name = one.medium.places[0].name
    grid = (one.medium.grid[0], *grid_of(one.size, rules, rules.video_min_pixels, most, name))
    return replace(one, medium=replace(one.medium, grid=grid))


def _fewer_frames(media: Sequence[SeenMedium], space: int, rules: VisionRules) -> list[SeenMedium]:
    """Pairs of frames are taken from each video in turn, more at a time from one of more tokens, until enough are."""
    places = [i for i, one in enumerate(media) if one.video]
    tokens = [tokens_of(media[i].medium, rules) for i in places]
    frames = [media[i].medium.grid[0] for i in places]
    shares = [count / sum(tokens) for count in tokens]  # in this order of rounding, as ERNIEKit does
    at_a_time = [round(share / min(shares)) * rules.temporal for share in shares]
    over, stuck, turn = sum(tokens) - space, 0, 0
    left = list(frames)
    while (over > 0 if rules.compat else over >= 0) and stuck < len(places):
        k = turn % len(places)
        if left[k] - at_a_time[k] >= rules.temporal:
            left[k] -= at_a_time[k]
            over -= at_a_time[k] * (tokens[k] // frames[k])
            stuck = 0
        else:
            stuck += 1
        turn += 1
    out = list(media)
    for i, count in zip(places, left):
        out[i] = _with_frames(media[i], count)
    return out


def _with_frames(one: SeenMedium, count: int) -> SeenMedium:
    """Every n-th; where these are too many, spread evenly from the first of them to the last."""
    medium = one.medium
    before = medium.grid[0]
    chosen = list(range(before))[:: max(1, before // count)]
    if len(chosen) > count:
        chosen = [chosen[round(i * (len(chosen) - 1) / (count - 1))] for i in range(count)]
    several = len(medium.places) > 1
    return replace(
        one,
        medium=replace(
            medium,
            grid=(len(chosen), *medium.grid[1:]),
            frames=tuple(medium.frames[i] for i in chosen) if medium.frames else (),
            stamps=tuple(medium.stamps[i] for i in chosen) if medium.stamps else (),
            places=tuple(medium.places[i] for i in chosen) if several else medium.places,
            digests=tuple(medium.digests[i] for i in chosen) if several else medium.digests,
        ),
    )
