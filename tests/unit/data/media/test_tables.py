"""Sizes, frames and time stamps against the recorded tables of ERNIEKit's functions."""

from __future__ import annotations

import pytest

from erniekit.data.media.frames import FrameRules, even, frame_indices, stamp_text
from erniekit.data.media.limits import MediaError
from erniekit.data.media.sizes import fitted
from support.seen import new_stack, recorded


def test_sizes_are_the_recorded_ones() -> None:
    for height, width, least, most, told in recorded()["smart_resize"]["rows"]:
        if isinstance(told, str):
            with pytest.raises(MediaError):
                fitted(height, width, least, most, squeeze=True)
        else:
            assert list(fitted(height, width, least, most, squeeze=True)) == told


def test_a_strip_is_refused_unless_it_may_be_squeezed() -> None:
    assert fitted(8, 2617, 3136, 4_842_768, squeeze=True) == (28, 5600)
    with pytest.raises(MediaError, match="200 times"):
        fitted(8, 2617, 3136, 4_842_768)


def test_frame_indices_are_the_recorded_ones() -> None:
    for frames, rate, sample, target, fps, told in recorded()["frame_indices"]["rows"]:
        assert frame_indices(frames, rate, FrameRules(fps, -1, -1, target, sample)) == told


def test_frame_counts_are_those_of_the_new_stack_for_its_bounds() -> None:
    for name, count in new_stack()["sampling_args"].items():
        _, duration, _, fps = name.split()
        rules = FrameRules(float(fps), 16, 180).for_video(float(duration))
        chosen = rules.target if rules.target > 0 else int(float(duration) * rules.fps)
        assert chosen == count


def test_random_frames_are_the_same_for_a_seed_and_stay_in_their_parts() -> None:
    rules = FrameRules(-1, -1, -1, 8, "rand")
    drawn = frame_indices(80, 10.0, rules, seed=3)
    assert drawn == frame_indices(80, 10.0, rules, seed=3)
    assert drawn != frame_indices(80, 10.0, rules, seed=4)
    assert [i // 10 for i in drawn] == list(range(8))


def test_time_stamps_read_as_recorded() -> None:
    for seconds, told in recorded()["timestamps"]:
        assert stamp_text(seconds) == told


def test_an_odd_number_of_frames_repeats_the_last() -> None:
    assert even([1, 4, 9]) == [1, 4, 9, 9]
    assert even([1, 4]) == [1, 4]
