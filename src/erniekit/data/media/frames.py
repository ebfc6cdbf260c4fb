"""Which frames of a video are used, and their time stamps. ERNIEKit's rules."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from erniekit.data.media.limits import MediaError


@dataclass(frozen=True)
class FrameRules:
    """`fps` frames a second as long as that gives `least` to `most`; outside, or with `target`, that many equal parts
    of the video. A value of -1 is none."""

    fps: float = 2.0
    least: int = 16
    most: int = 480
    target: int = -1
    sample: str = "middle"  # of each interval: middle, leading or rand

    def for_video(self, duration: float) -> FrameRules:
        """With either `fps` or `target` set."""
        if self.target > 0:
            return replace(self, fps=-1.0)
        count = int(duration * self.fps)
        if self.least > 0 and count < self.least:
            return replace(self, fps=-1.0, target=self.least)
        if self.most > 0 and count > self.most:
            return replace(self, fps=-1.0, target=self.most)
        return self


def frame_indices(frames: int, rate: float, rules: FrameRules, seed: int = 0) -> list[int]:
    """Of a video of this number of frames at `rate` a second; `rules` as `for_video` returns them."""
    if rules.target > 0:
        bounds = np.linspace(0, frames, min(rules.target, frames) + 1).astype(int).tolist()
        parts = list(zip(bounds, (end - 1 for end in bounds[1:])))
        if rules.sample == "rand":
            draw = random.Random(seed)
            return [draw.randint(first, last) for first, last in parts]
        return [first if rules.sample == "leading" else (first + last) // 2 for first, last in parts]
    if rules.fps <= 0 or rate <= 0:
        raise MediaError("frames", "neither video_fps nor video_target_frames sets how many frames to take")
    step, duration = 1 / rules.fps, frames / rate
    if rules.sample == "leading":
        seconds = np.arange(0, duration, step)
    else:
        seconds = np.arange(step / 2, duration + step / 2, step)
    if rules.sample == "rand":
        seconds = seconds + (np.random.default_rng(seed).random(len(seconds)) - 0.5) * step
    return [i for i in np.around(seconds * rate).astype(int).tolist() if 0 <= i < frames]


def even(indices: Sequence[int], pair: int = 2) -> list[int]:
    """The last repeated until their number divides by `pair`: frames are merged in pairs."""
    return [*indices, *[indices[-1]] * (-len(indices) % pair)]


def stamp_text(seconds: float) -> str:
    """59.996 s reads 00:00:60.00, as in training: seconds are rounded after minutes are taken off."""
    hours, seconds = divmod(seconds, 3600)
    minutes, seconds = divmod(seconds, 60)
    return f"{int(hours):02d}:{int(minutes):02d}:{seconds:05.2f}"
