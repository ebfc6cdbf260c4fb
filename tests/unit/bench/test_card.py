"""A card's gauges, read from a program that speaks as nvidia-smi does: rightly, oddly, or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from erniekit.bench import card
from erniekit.bench.card import QUERY, Watch, medians, parse
from erniekit.bench.measure import product_rate
from erniekit.devices import pick
from support.clock import Clock, until

Speak = Callable[[str], Path]
FOREVER = "while true; do echo '1470, 692.31, 58'; sleep 0.02; done"


@pytest.fixture
def speak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Speak:
    """An nvidia-smi that does what it is told here; it leaves its process id and its words in the folder."""

    def install(lines: str) -> Path:
        program = tmp_path / "nvidia-smi"
        program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\necho $$ > {tmp_path}/pid\n{lines}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return tmp_path

    return install


def alive(pid: int) -> bool:
    """A process that has ended and that nobody has asked after yet is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_readings_arrive_while_it_runs_and_the_program_ends_with_the_run(speak: Speak) -> None:
    folder = speak("echo '1980, 300.00, 40'; echo '1470, 692.31, 58'; echo '1455, 691.00, 60'; exec sleep 100")
    with Watch("GPU-1234") as watch:
        until(lambda: len(watch.last(60)) == 3)
        assert medians(watch.last(60)) == {"clock_mhz": 1470.0, "power_w": 691.0, "temperature_c": 58.0}
        pid = int((folder / "pid").read_text())
        assert alive(pid)
    assert not alive(pid)
    assert (folder / "words").read_text().split() == [*QUERY[1:], "GPU-1234"]


def test_only_the_last_seconds_count_but_never_less_than_a_reading_takes(
    speak: Speak, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(card, "time", clock)
    told = f"until [ -e {tmp_path}/go ]; do sleep 0.01; done"
    folder = speak(f"echo '1980, 300, 40'; {told}; echo '1470, 692, 58'; exec sleep 100")
    with Watch("GPU-1234") as watch:
        until(lambda: len(watch.last(60)) == 1)
        clock.sleep(0.6)
        (folder / "go").touch()
        until(lambda: len(watch.last(60)) == 2)
        clock.sleep(0.2)
        assert medians(watch.last(0.001))["clock_mhz"] == 1470.0
        assert medians(watch.last(0.9))["clock_mhz"] == (1980 + 1470) / 2
        clock.sleep(0.1)
        assert watch.last(0.001) == []


@pytest.mark.parametrize(
    "lines",
    [
        "echo 'No devices were found'; exit 6",
        "echo '[N/A], [N/A], [N/A]'; echo 'clocks.sm, power.draw, temperature.gpu'",
        "head -c 3000 /dev/urandom",
        "head -c 3000 /dev/zero | tr '\\0' 7",
        "echo '1470, 692'; echo '1470, 692, 58, 3'; echo 'nan, inf, nan'",
        "exec >&-; exec sleep 100",
    ],
)
def test_odd_words_are_no_reading_and_no_error(speak: Speak, lines: str) -> None:
    folder = speak(lines)
    with Watch("GPU-1234") as watch:
        until((folder / "pid").exists)
        time.sleep(0.1)
        assert medians(watch.last(60)) == {}


def test_a_machine_without_the_program_or_without_a_card_has_no_readings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pick("cpu").smi_id() is None
    for name in ("GPU-1234", None):
        with Watch(name) as watch:
            assert watch.last(60) == []
    (tmp_path / "nvidia-smi").write_text("not a program")  # and not executable
    with Watch("GPU-1234") as watch:
        assert watch.last(60) == []


def test_a_field_the_card_does_not_tell_is_left_out(speak: Speak) -> None:
    assert parse("1470, [N/A], 58\n") == (1470.0, None, 58.0)
    speak("echo '1470, [N/A], 58'; exec sleep 100")
    with Watch("GPU-1234") as watch:
        until(lambda: bool(watch.last(60)))
        assert medians(watch.last(60)) == {"clock_mhz": 1470.0, "temperature_c": 58.0}


def test_the_rate_of_a_product_comes_with_the_gauges_meanwhile(speak: Speak) -> None:
    speak(FOREVER)
    with Watch("GPU-1234") as watch:
        until(lambda: bool(watch.last(60)))
        for _ in range(20):  # a program that gets no time meanwhile gives no reading of these products
            told = product_rate(pick("cpu"), torch.float32, watch, held_seconds=0.2).record()
            if "clock_mhz" in told:
                break
    assert (told["clock_mhz"], told["power_w"], told["temperature_c"]) == (1470.0, 692.31, 58.0)


def test_a_worker_that_is_killed_leaves_no_program_behind(speak: Speak) -> None:
    folder = speak(FOREVER)
    lines = "from erniekit.bench.card import Watch\nwith Watch('GPU-1'): __import__('time').sleep(100)"
    worker = subprocess.Popen([sys.executable, "-c", lines])
    try:
        until(lambda: (folder / "pid").exists() and bool((folder / "pid").read_text()))
        pid = int((folder / "pid").read_text())
        assert alive(pid)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    until(lambda: not alive(pid))
