"""Every rank's words in its file, rank 0's on the screen too, and nothing lost or garbled on the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.launch.logs import Relay, own_folder
from support.clock import until


def speak(relay: Relay, rank: int, code: str) -> None:
    """A process that writes where the relay tells it to, opened by path as torch does."""
    out, err = relay.open(rank)
    with open(out, "w") as stdout, open(err, "w") as stderr:
        subprocess.run([sys.executable, "-c", code], stdout=stdout, stderr=stderr, check=True)
    relay.release()


def test_rank_0_is_on_the_screen_and_in_its_file_the_others_in_theirs(tmp_path: Path, capfd) -> None:
    relay = Relay(tmp_path)
    both = "import sys; print('to out', flush=True); print('to err', file=sys.stderr)"
    speak(relay, 0, both)
    speak(relay, 1, both.replace("to", "one to"))
    relay.close()
    seen = capfd.readouterr()
    assert (seen.out, seen.err) == ("to out\n", "to err\n")
    assert sorted((tmp_path / "workerlog.0").read_text().split("\n")) == ["", "to err", "to out"]
    assert (tmp_path / "workerlog.1").read_text() == "one to out\none to err\n"


def test_a_bar_leaves_its_last_state_in_the_log_and_no_colours(tmp_path: Path, capfd) -> None:
    relay = Relay(tmp_path)
    speak(relay, 0, r"print('\r10%|#  |\r20%|## |\r100%|###|\n\x1b[31mred\x1b[0m words', end='')")
    relay.close()
    assert (tmp_path / "workerlog.0").read_text() == "100%|###|\nred words\n"
    assert "10%" in capfd.readouterr().out


def test_one_previous_run_is_kept_and_the_attempts_of_this_one(tmp_path: Path) -> None:
    for run in ("first", "second", "third"):
        relay = Relay(tmp_path)
        for attempt in (1, 2, 3):
            speak(relay, 1, f"print('{run} {attempt}')")
        relay.close()
    told = {p.name: p.read_text().strip() for p in tmp_path.glob("workerlog.*")}
    assert told == {
        "workerlog.1": "third 3",
        "workerlog.1.attempt-1": "third 1",
        "workerlog.1.attempt-2": "third 2",
        "workerlog.1.1": "second 3",
    }


def test_logs_of_another_launcher_are_left_alone_and_ours_go_beside(tmp_path: Path) -> None:
    wanted = tmp_path / "logs"
    wanted.mkdir()
    (wanted / "workerlog.0").write_text("another program's")
    (wanted / "workerlog.0.1").write_text("and its older one")
    assert own_folder(wanted) == tmp_path / "logs-1"
    assert own_folder(wanted) == tmp_path / "logs-1", "the same place the next time"
    assert {p.name: p.read_text() for p in wanted.iterdir()} == {
        "workerlog.0": "another program's",
        "workerlog.0.1": "and its older one",
    }
    assert own_folder(tmp_path / "fresh") == tmp_path / "fresh"


def test_what_a_rank_says_after_the_screen_is_muted_is_in_its_log_only(tmp_path: Path, capfd) -> None:
    relay = Relay(tmp_path)
    out, _ = relay.open(0)
    with open(out, "w", buffering=1) as screen:
        screen.write("half a line")
        screen.flush()
        until(lambda: relay._mid_line)
        relay.mute()
        relay.emit("error: the launcher's own words")
        screen.write(" and noise\n")
    relay.close()
    seen = capfd.readouterr()
    assert seen.out == "half a line"
    assert seen.err == "\nerror: the launcher's own words\n"
    assert (tmp_path / "workerlog.0").read_text() == "half a line and noise\n"


def test_much_output_arrives_whole(tmp_path: Path) -> None:
    relay = Relay(tmp_path)
    speak(relay, 1, "for k in range(30000): print('line', k)")
    relay.close()
    lines = (tmp_path / "workerlog.1").read_text().splitlines()
    assert lines == [f"line {k}" for k in range(30000)]


def test_a_disk_that_is_full_does_not_stop_the_rank(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "workerlog.1").symlink_to("/dev/full")
    relay = Relay(tmp_path)
    relay._fresh = relay.path  # type: ignore[method-assign]  # leave the link in place
    speak(relay, 1, "for k in range(30000): print('line', k)")
    relay.close()
