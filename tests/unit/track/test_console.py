"""The terminal: a real pseudo-terminal shows one bar with lines above it; a pipe gets ERNIEKit's plain lines."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

from erniekit.track.base import RunInfo
from erniekit.track.console import ConsoleTracker, metrics_line
from erniekit.track.progress import summary

RUN = """
import sys, time, warnings
from erniekit.log import emit
from erniekit.track import make_trackers
trackers = make_trackers([], sys.argv[1], disable_tqdm={disable_tqdm})
trackers.start(total_steps=6, start_step=2)
for step in range(3, 7):
    time.sleep(0.12)
    trackers.advance(step)
    trackers.log(step, dict(loss=9 - step, learning_rate=1e-4, tokens_per_second=12345.6,
                            max_memory_allocated=3.21, mfu=0.41))
    if step == 4:
        trackers.status("evaluating 1/2")
        trackers.log(step, dict(eval_loss=2.5, eval_runtime=0.5), "eval")
        trackers.status("")
        trackers.event(step, "save", "checkpoint-4")
        emit("said by another room")
        print("a warning of a library", file=sys.stderr)
trackers.log(6, dict(train_loss=4.5, train_runtime=3.0), "end")
trackers.close()
print("after the run")
"""


def in_a_terminal(code, folder, columns):
    """Run code on a pseudo-terminal; the rows left on its screen and everything that was sent to it."""
    terminal, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    command = [sys.executable, "-c", code, str(folder)]
    process = subprocess.Popen(command, stdin=side, stdout=side, stderr=side)
    os.close(side)
    sent = b""
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        sent += chunk
    os.close(terminal)
    assert process.wait() == 0, sent.decode()
    text = re.sub(r"\x1b\[[0-9;]*m", "", sent.decode())
    return screen(text), text


def screen(text):
    rows: list[list[str]] = [[]]
    column = 0
    for char in text:
        if char == "\r":
            column = 0
        elif char == "\n":
            rows.append([])
        else:
            row = rows[-1]
            row.extend(" " * (column + 1 - len(row)))
            row[column] = char
            column += 1
    return [row for row in ("".join(row).rstrip() for row in rows) if row]


def test_a_terminal_shows_one_bar_and_keeps_every_other_line_above_it(tmp_path):
    rows, sent = in_a_terminal(RUN.format(disable_tqdm=None), tmp_path, columns=100)
    assert rows[:4] == [
        "eval_loss: 2.500000, global_step: 4, eval_runtime: 0.5 s",
        "step 4 save: checkpoint-4",
        "said by another room",
        "a warning of a library",
    ]
    bars = [row for row in rows if "|" in row]
    assert len(bars) == 1
    assert re.match(r"100%\|█+\| 6/6 ETA 00:00, loss 3.000, lr 1.0e-4, 12.3k tok/s, 3.2 GiB, MFU 41%$", bars[0])
    assert rows[5] == "after the run", "the recipe, not the tracker, says how the run ended"
    assert "2/6" in sent, "a resumed bar starts at the step it resumed from"
    assert "evaluating 1/2" in sent
    assert "0/6" not in sent


def test_every_number_of_the_bar_fits_eighty_columns(tmp_path):
    rows, _ = in_a_terminal(RUN.format(disable_tqdm=False), tmp_path, columns=80)
    (bar,) = [row for row in rows if "|" in row]
    assert len(bar) <= 80
    assert bar.endswith("MFU 41%")


def test_a_pipe_gets_one_plain_line_a_logged_step(tmp_path):
    code = RUN.format(disable_tqdm=None)
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    rows = done.stdout.splitlines()
    assert re.match(
        r"loss: 6.000000, learning_rate: 0.0001, global_step: 3, tokens_per_second: 12346, "
        r"max_memory_allocated: 3.21 GiB, mfu: 41.0%, eta: \d\d:\d\d$",
        rows[0],
    )
    assert [row.split(",")[0] for row in rows] == [
        "loss: 6.000000",
        "loss: 5.000000",
        "eval_loss: 2.500000",
        "step 4 save: checkpoint-4",
        "said by another room",
        "loss: 4.000000",
        "loss: 3.000000",
        "after the run",
    ]
    assert done.stderr == "a warning of a library\n"


def test_the_time_left_leaves_out_what_the_first_step_takes_once(tmp_path, monkeypatch, capsys):
    clock = [100.0]
    monkeypatch.setattr("erniekit.track.console.time.monotonic", lambda: clock[0])
    tracker = ConsoleTracker()
    tracker.start(RunInfo(output_dir=tmp_path, total_steps=10, start_step=2, disable_tqdm=True))
    for step, at in ((3, 700.0), (4, 702.0), (5, 704.0)):  # ten minutes of compilation, then two seconds a step
        clock[0] = at
        tracker.log(step, {"loss": 1.0}, "train")
    etas = [line.rpartition("eta: ")[2] for line in capsys.readouterr().out.splitlines()]
    assert etas == ["1:10:00", "00:12", "00:10"]


def test_disable_tqdm_gives_plain_lines_on_a_terminal_too(tmp_path):
    rows, _ = in_a_terminal(RUN.format(disable_tqdm=True), tmp_path, columns=100)
    assert not [row for row in rows if "|" in row]
    assert sum(row.startswith("loss: ") for row in rows) == 4


def test_lines_say_when_a_value_is_not_finite():
    assert metrics_line(3, {"loss": float("nan")}) == "loss: nan, global_step: 3"


def test_the_bar_shows_only_what_is_known():
    assert summary({"loss": 2.0, "learning_rate": 0.0}) == "loss 2.000, lr 0.0"
    assert summary({"max_memory_allocated": 31.27}) == "31 GiB"
