"""The hang watchdog: its limits, what counts as silence, and what it costs. Real hangs are in tests/faults."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from erniekit.train import monitor, watchdog
from erniekit.train.monitor import HangDetector, SharedHeartbeat
from erniekit.train.watchdog import STACKS_SIGNAL, HangLimits, Watchdog
from support.clock import PATIENCE_S, Clock, until

NEVER = (math.inf, math.inf)


@pytest.fixture
def beats() -> Iterator[SharedHeartbeat]:
    fd = os.memfd_create("beats")
    os.ftruncate(fd, 4096)
    made = SharedHeartbeat(fd)
    yield made
    made.close()
    os.close(fd)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of those who watch and of a watchdog that is not entered: of what has no thread and no process."""
    made = Clock()
    for module in (monitor, watchdog):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.mark.parametrize(
    ("limits", "phase", "median", "steps", "expected"),
    [
        (HangLimits(), "data", 0.5, 9, (60, 180)),
        (HangLimits(), "data", 20.0, 9, (200, 600)),
        (HangLimits(), "data", 0.0, 0, (600, 1800)),  # the first steps
        (HangLimits(), "save", 20.0, 9, (2000, 6000)),
        (HangLimits(), "prepare", 0.0, 0, (1200, 3600)),
        (HangLimits(7), "forward/backward", 20.0, 9, (7, 21)),
        (HangLimits(7, 9), "eval", 20.0, 9, (70, 90)),
        (HangLimits(-1), "data", 20.0, 9, NEVER),
        (HangLimits(-1, 9), "data", 20.0, 9, (math.inf, 9)),
        (HangLimits(7, -1), "data", 20.0, 9, (7, math.inf)),
    ],
)
def test_limits_follow_the_step_time_and_the_phase(
    limits: HangLimits, phase: str, median: float, steps: int, expected: tuple[float, float]
) -> None:
    assert limits.of(phase, median, steps) == expected


def test_silence_is_told_once_softly_then_hard_and_progress_ends_it(clock: Clock, beats: SharedHeartbeat) -> None:
    detector = HangDetector(beats, every=1.0)
    now = clock.now
    beats.beat(now - 10, 20, 40, 3, "data")
    assert detector.check()[0] == ""
    beats.beat(now - 30, 20, 40, 3, "data")
    word, beat, silence = detector.check()
    assert (word, beat.step, beat.phase) == ("soft", 3, "data")
    assert silence == 30
    assert detector.check()[0] == ""
    beats.beat(now, 20, 40, 4, "data")
    assert detector.check()[0] == "back"
    assert detector.check()[0] == ""
    beats.beat(now - 50, 20, 40, 4, "collective")
    assert detector.check()[0] == "hard"


def test_the_one_outside_is_later_than_the_thread(clock: Clock, beats: SharedHeartbeat) -> None:
    inside, outside = HangDetector(beats, 1.0), HangDetector(beats, 1.0, late_soft=0.5, late_hard=2.0)
    beats.beat(clock.now - 20.2, 20, 40, 3, "data")
    assert [who.check()[0] for who in (inside, outside)] == ["soft", ""]
    beats.beat(clock.now - 41, 20, 40, 3, "data")
    assert [who.check()[0] for who in (inside, outside)] == ["hard", "soft"]


def test_time_in_which_the_watcher_stood_still_is_excused(clock: Clock, beats: SharedHeartbeat) -> None:
    detector = HangDetector(beats, every=0.05)
    beats.beat(clock.now, 0.5, 1.0, 3, "data")
    clock.sleep(1.3)
    word, _, silence = detector.check()
    assert word == ""
    assert silence == pytest.approx(0.05)
    clock.sleep(0.4)
    assert detector.check()[2] == pytest.approx(0.45), "what follows counts"


def test_a_silent_step_leaves_the_stacks_of_all_threads_and_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    before, end = signal.getsignal(STACKS_SIGNAL), time.monotonic() + PATIENCE_S
    with Watchdog(tmp_path, rank=3, soft_s=0.2, hard_s=-1, details=lambda: "last collectives: none") as dog:
        for step in range(1, 4):
            dog.beat(step)
        dog.phase("collective")
        path = tmp_path / "hangs" / "rank-3-step-4.txt"
        # A machine that stands still before the phase gets a report of its own.
        until(lambda: path.exists() and "last collectives" in path.read_text().partition("phase collective")[2])
        dog.beat(4)
        errors = ""
        while "rank 3 continues: step 5" not in errors:
            assert time.monotonic() < end, errors
            dog.progress()
            time.sleep(0.02)
            errors += capfd.readouterr().err
    text = path.read_text()
    assert re.search(r"rank 3 made no progress for \d+\.\d s at step 4, phase collective", text)
    assert "test_a_silent_step_leaves" in text
    assert "MainThread" in text
    assert f"stacks in {path}" in errors
    assert signal.getsignal(STACKS_SIGNAL) == before
    dog.phase("data")  # after the end nobody listens, and nothing breaks


def test_the_median_step_leaves_out_evaluating_and_saving(clock: Clock, tmp_path: Path) -> None:
    dog = Watchdog(tmp_path)
    for step in range(1, 6):
        dog.phase("data")
        clock.sleep(0.01)
        dog.phase("save")
        clock.sleep(0.05)
        dog.beat(step)
    assert dog._median == pytest.approx(0.01)


def test_the_monitor_is_there_at_once_has_no_torch_and_hardly_costs(tmp_path: Path) -> None:
    with Watchdog(tmp_path) as dog:
        until(lambda: dog._beats.monitor)
        pid = dog._beats.monitor
        assert dog._monitor is not None
        assert pid == dog._monitor.pid
        assert _cpu(pid) < 1, "to start, of its own time; 0.02 measured, and importing torch takes 2"
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
        costs: list[float] = []
        while not costs or (min(costs) >= 0.001 * 2.0 and len(costs) < 8):  # others disturb a window, not all of them
            before = _cpu(pid)
            time.sleep(2.0)
            costs.append(_cpu(pid) - before)
        assert min(costs) < 0.001 * 2.0, "0.1 %"
    assert not Path(f"/proc/{pid}").exists()


def test_the_run_does_not_wait_for_the_monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never_ready = tmp_path / "python"
    never_ready.write_text("#!/bin/sh\nexec sleep 600\n")
    never_ready.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(never_ready))
    with Watchdog(tmp_path) as dog:
        assert dog._monitor is not None
        assert dog._monitor.poll() is None
        assert not dog._beats.monitor
    assert dog._monitor.poll() is not None


def test_saying_where_the_loop_is_costs_microseconds(tmp_path: Path) -> None:
    dog = Watchdog(tmp_path)
    began = time.thread_time()
    for step in range(1000):
        dog.phase("data")
        dog.phase("forward/backward")
        dog.beat(step)
    assert (time.thread_time() - began) / 1000 < 200e-6  # measured: 11 us a step


def _cpu(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


@pytest.mark.parametrize("written", [0, 8, 60])
def test_a_beat_caught_in_the_middle_is_the_one_before_and_no_silence(
    clock: Clock, beats: SharedHeartbeat, written: int
) -> None:
    detector = HangDetector(beats, 0.1)
    assert detector.check()[0] == "", "nobody has begun yet"
    now = clock.now
    beats.beat(now, 5.0, 9.0, 3, "data")
    assert detector.check()[:2] == ("", beats.read())
    whole = beats._map[:128]
    beats._map[:128] = whole[:written] + bytes(128 - written)  # as another process may see it, under load
    word, beat, silence = detector.check()
    assert (word, beat.step, beat.phase, beat.at) == ("", 3, "data", now)
    assert silence == 0
    beats._map[:128] = whole
    assert beats.read().step == 3


def test_what_the_loop_is_at_is_told_in_words(tmp_path: Path) -> None:
    dog = Watchdog(tmp_path)
    told = []
    for phase in ("prepare", "start", "data"):
        dog.phase(phase)
        told.append(dog.doing)
    dog.beat(1)
    for phase in ("save", "eval", "collective"):
        dog.phase(phase)
        told.append(dog.doing)
    assert told == [
        "the run was being prepared",
        "the run was being prepared",
        "step 1 was under way",
        "checkpoint-1 was being saved",
        "the run was at step 1 (eval)",
        "step 2 was under way",
    ]
