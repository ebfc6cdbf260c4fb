"""The launcher with real processes: logs, failures, restarts, signals, and several launchers as several machines."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from erniekit.errors import ConfigError
from erniekit.launch import agent
from erniekit.launch.plan import LaunchPlan
from erniekit.launch.start import start

sys.path.insert(0, str(Path(__file__).parent))

from launchers import LATE_S, LEFT_S, WORKER, Launcher, launcher, wait_for, wait_for_host, wait_for_words

from support.clock import until
from support.processes import alive, wait_until_gone


@pytest.fixture
def ranks(tmp_path: Path, capfd) -> Callable[..., tuple[int, str, str]]:
    """ranks("what", args...) -> exit code, stdout, stderr of two ranks started from this process."""

    def go(*words: object, **keys: object) -> tuple[int, str, str]:
        before = dict(os.environ)
        launch = replace(LaunchPlan(2, log_dir=tmp_path / "logs", max_restarts=0), **keys)
        code = start(launch, [sys.executable, WORKER, *map(str, words)])
        assert dict(os.environ) == before
        seen = capfd.readouterr()
        return code, seen.out, seen.err

    return go


def test_every_rank_has_its_log_and_rank_0_the_screen(ranks: Callable, tmp_path: Path) -> None:
    code, out, err = ranks("say_hello")
    assert code == 0
    assert out == "rank 0 of 2, attempt 0\n"
    # the launcher and its ranks write to the screen as they come
    assert sorted(err.splitlines()) == ["hello", f"ranks 0 to 1; output of each: {tmp_path}/logs/workerlog.N"]
    assert (tmp_path / "logs" / "workerlog.1").read_text() == "rank 1 of 2, attempt 0\nhello\n"


def since_all_were_there(folder: Path) -> float:
    return time.time() - max(path.stat().st_mtime for path in folder.glob("attempt-*"))


def test_a_users_error_is_shown_once_in_full_and_never_restarted(ranks: Callable, tmp_path: Path) -> None:
    code, _, err = ranks("user_error", tmp_path, max_restarts=3)
    assert code == 2
    assert err.splitlines()[1:] == ["error: no rows", "where: a.jsonl", "fix:   add some"]
    assert since_all_were_there(tmp_path) < LATE_S
    assert "error: no rows" in (tmp_path / "logs" / "workerlog.1").read_text()


def test_a_crash_shows_its_traceback_first_and_is_restarted(ranks: Callable, tmp_path: Path) -> None:
    code, out, err = ranks("crash_once", tmp_path, max_restarts=1)
    assert code == 0
    lines = err.splitlines()[1:]
    assert lines[0] == "error: ZeroDivisionError: oops"
    assert 'raise ZeroDivisionError("oops")' in err
    assert "workerlog.1" in lines[-2]
    assert lines[-1] == "restart 1 of 1 in 1 s"
    assert "SIGTERM" not in err
    assert "ChildFailedError" not in err
    # what rank 0 has said last may come too late for the screen, where the other's error is by then
    assert out.splitlines()[-1] == "rank 0 of 2, attempt 1"
    assert (tmp_path / "logs" / "workerlog.0.attempt-1").read_text().startswith("rank 0 of 2, attempt 0\n")
    assert "about to fail" in (tmp_path / "logs" / "workerlog.1.attempt-1").read_text()
    assert len(list(tmp_path.glob("attempt-*"))) == 4
    (launch,) = {path.read_text() for path in tmp_path.glob("attempt-*")}
    assert launch, "one name for all ranks and attempts"


def test_after_the_last_restart_the_ranks_own_code_is_returned(
    ranks: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "BACK_OFF_S", 0.1)
    code, _, err = ranks("die", tmp_path, 70, max_restarts=1)
    assert code == 70
    assert err.count("error: rank 1 ended with exit code 70") == 2
    assert len(list(tmp_path.glob("attempt-1-*"))) == 2


def test_a_rank_that_does_not_hear_is_killed_with_what_it_started(
    ranks: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert agent.LEAVE_S < LEFT_S - 5
    monkeypatch.setattr(agent, "LEAVE_S", 0.5)
    code, _, _ = ranks("deaf", tmp_path)
    assert code == 1
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    wait_until_gone(*pids, seconds=LATE_S)


def test_the_others_may_finish_their_save_when_one_rank_has_left(ranks: Callable, tmp_path: Path) -> None:
    code, _, err = ranks("one_leaves_early", tmp_path, max_restarts=3)
    assert code == 75
    assert (tmp_path / "saved").exists(), "rank 0 was still saving when rank 1 left"
    assert err.splitlines()[-1] == "saved by rank 0"
    assert "error:" not in err


def test_a_rank_that_never_gets_to_its_save_is_not_waited_for_and_the_save_counts(
    ranks: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "SLACK_S", 0.1)
    monkeypatch.setattr(agent, "LEAVE_S", 0.2)
    code, _, err = ranks("one_is_stuck", tmp_path, grace_s=0.2, max_restarts=3)
    assert code == 75
    assert "error: rank 1 did not leave" in err
    assert "restart" not in err


def test_logs_that_cannot_be_written_are_a_users_error(ranks: Callable, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no logs of the ranks"):
        ranks("say_hello", log_dir=tmp_path / "file" / "logs")


def test_a_hang_up_ends_nothing_under_nohup(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = saving_launcher(tmp_path, 0)
    finally:
        signal.signal(signal.SIGHUP, before)
    process.kill(signal.SIGHUP)
    time.sleep(0.5)
    assert not list(tmp_path.glob("saved-*"))
    process.kill(signal.SIGTERM)
    assert process.wait() == 75


@pytest.mark.full
def test_a_killed_rank_takes_the_run_down_and_the_restart_goes_on(ranks: Callable, tmp_path: Path) -> None:
    code, out, err = ranks("add_ranks", tmp_path, 6, 1, max_restarts=1)
    assert code == 0, err
    assert "error: rank 1 was ended by SIGKILL" in err.splitlines()[1]
    killed, again = (float((tmp_path / name).read_text()) for name in ("killed", "began-0-1"))
    left = again - killed - agent.BACK_OFF_S
    assert 0 <= left < LATE_S
    for rank in (0, 1):
        steps = [tuple(word.split(":")) for word in (tmp_path / f"steps-{rank}").read_text().split()]
        assert [(step, attempt) for step, attempt, _ in steps] == [(str(k), "0" if k < 3 else "1") for k in range(6)]
        assert {total for _, _, total in steps} == {"3"}
    assert out.splitlines()[-1] == "sum 3"
    print(f"the other rank had left {left:.2f} s after the kill")


# --- signals


def started(folder: Path, *words: object, **keys: object) -> Launcher:
    """Two ranks, both there."""
    process = launcher(folder, LaunchPlan(2, log_dir=folder / "logs", **keys), *words)
    wait_for(folder / "pid-0", folder / "pid-1")
    return process


def saving_launcher(folder: Path, seconds: float) -> Launcher:
    return started(folder, "save_when_told", folder, seconds)


def test_sigterm_to_the_launcher_lets_every_rank_save(tmp_path: Path) -> None:
    process = saving_launcher(tmp_path, 0.5)
    process.kill(signal.SIGTERM)
    assert process.wait() == 75
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["SIGTERM", "SIGTERM"]
    assert process.said()[1:] == ["saved by rank 0"]


def test_a_signal_that_comes_while_the_ranks_are_started_lets_them_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = agent.LocalElasticAgent._start_workers

    def told_in_between(*args: Any) -> dict[int, Any]:
        pids = plain(*args)
        wait_for(tmp_path / "pid-0", tmp_path / "pid-1")  # as where the launcher stood still
        os.kill(os.getpid(), signal.SIGTERM)
        return pids

    monkeypatch.setattr(agent.LocalElasticAgent, "_start_workers", told_in_between)
    assert saving_launcher(tmp_path, 0).wait() == 75
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["SIGTERM", "SIGTERM"]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_ranks_that_do_not_leave_in_time_are_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(agent, "SLACK_S", 0.1)
    monkeypatch.setattr(agent, "LEAVE_S", 0.2)
    process = started(tmp_path, "never_leaves", tmp_path, grace_s=0.2)
    process.kill(number)
    assert process.wait() == 128 + number
    assert process.said()[1:] == [
        "error: rank 0, 1 did not leave within 0 s of the signal",
        "fix:   raise preempt_grace_s",
    ]


def test_asked_twice_ranks_that_do_not_leave_are_not_waited_for_and_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "LEAVE_S", 0.2)
    process = started(tmp_path, "never_leaves", tmp_path)
    process.kill(signal.SIGINT)
    wait_for(tmp_path / "told-0", tmp_path / "told-1")  # two signals that come at once count as one
    process.kill(signal.SIGINT)
    assert process.wait() == 130
    assert process.said()[1:] == ["stopped by SIGINT without a save", "next: run the same command"]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_a_second_signal_ends_all_at_once_and_says_from_where_the_run_resumes(tmp_path: Path, number: int) -> None:
    (tmp_path / "run" / "checkpoint-40").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-40" / "MANIFEST.json").write_text("{}")
    process = started(tmp_path, "save_when_told", tmp_path, 30, output=tmp_path / "run")
    process.kill(number)
    wait_for(tmp_path / "told-0", tmp_path / "told-1")  # two signals that come at once count as one
    began = time.monotonic()
    process.kill(number)
    assert process.wait() == 128 + number
    assert time.monotonic() - began < LATE_S, "not the 30 s of the save"
    name = signal.Signals(number).name
    next_line = "next: run the same command; it resumes from checkpoint-40"
    assert process.said()[-2:] == [f"stopped by {name} without a save", next_line]
    assert not list(tmp_path.glob("saved-*"))


def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    process = saving_launcher(tmp_path, 0)
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in (0, 1)]
    assert all(map(alive, pids))
    process.kill(signal.SIGKILL)
    assert process.wait() == -9
    wait_until_gone(*pids, seconds=LATE_S)


# --- the screen


def test_on_a_terminal_rank_0_draws_one_bar_and_its_log_is_plain(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = launcher(tmp_path, LaunchPlan(2, log_dir=tmp_path / "logs"), "bar", terminal=theirs)
    os.close(theirs)
    screen = b""
    with contextlib.suppress(OSError):  # the last writer has left
        while select.select([ours], [], [], 30)[0]:
            screen += os.read(ours, 65536)
    os.close(ours)
    assert process.wait() == 0
    text = screen.decode()
    assert "isatty True True" in text
    assert "a line above the bar" in text
    assert len(re.findall(r"\d+%\|[^|\r\n]*\| \d+/20", text)) > 3, "it is drawn over and over"
    last = text.rstrip().rpartition("\r")[2]
    assert last.startswith("100%|")
    assert 60 < len(last) <= 100, "as wide as the terminal"
    log = (tmp_path / "logs" / "workerlog.0").read_text()
    assert "\r" not in log
    assert "\x1b" not in log
    assert "20/20" in log.splitlines()[-1]
    assert (tmp_path / "logs" / "workerlog.1").read_text().count("isatty False") == 1


# --- several launchers on this machine, as several machines


def two(max_restarts: int = 3) -> LaunchPlan:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    return LaunchPlan(1, nnodes=2, port=port, join_timeout_s=60.0, max_restarts=max_restarts)


def machine(folder: Path, common: LaunchPlan, node: int, numbered: bool, *words: object) -> Launcher:
    launch = replace(common, node_rank=node if numbered else None, log_dir=folder / "logs")
    return launcher(folder / f"machine-{node}", launch, *words)


def test_numbered_machines_share_a_users_error_and_do_not_restart(tmp_path: Path) -> None:
    common = two()
    machines = [machine(tmp_path, common, node, True, "user_error", tmp_path) for node in (0, 1)]
    assert [m.wait() for m in machines] == [2, 2]
    assert machines[0].said()[0].startswith("rank 0 of 2 on 2 machines")
    assert [m.said()[1:] for m in machines] == [["error: no rows", "where: a.jsonl", "fix:   add some"]] * 2
    assert since_all_were_there(tmp_path) < LATE_S


def test_a_machine_whose_ranks_do_not_leave_with_the_others_ends_as_preempted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "SLACK_S", 0.1)
    monkeypatch.setattr(agent, "LEAVE_S", 0.2)
    common = replace(two(), grace_s=0.2)
    machines = [machine(tmp_path, common, node, True, "one_is_stuck", tmp_path) for node in (0, 1)]
    assert [m.wait() for m in machines] == [75, 75], [m.said() for m in machines]
    assert machines[1].said()[1].startswith("error: rank 1 did not leave")
    assert not any(line.startswith("restart") for m in machines for line in m.said())


@pytest.mark.full
def test_machines_numbered_on_arrival_restart_together(tmp_path: Path) -> None:
    common = two(max_restarts=1)
    machines = [machine(tmp_path, common, node, False, "crash_once", tmp_path) for node in (0, 1)]
    assert [m.wait() for m in machines] == [0, 0], [m.said() for m in machines]
    assert len(list(tmp_path.glob("attempt-*"))) == 4
    assert len({path.read_text() for path in tmp_path.glob("attempt-*")}) == 1, "one name of the launch for all"
    for m in machines:
        assert m.said()[1] == "error: ZeroDivisionError: oops"
        assert m.said()[-1] == "restart 1 of 1 in 1 s"


def launch_of(attempt: int, pids: list[Path]) -> set[str]:
    """The launches that the ranks of this attempt take part in, once all are there.

    A machine that is back may begin with the attempt that has just failed: its rank leaves its id, and is ended.
    """
    found: list[dict[str, str]] = []

    def there() -> bool:
        found.clear()
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            found.extend(psutil.Process(int(path.read_text())).environ() for path in pids)
        return [env.get("TORCHELASTIC_RESTART_COUNT") for env in found] == [str(attempt)] * len(pids)

    until(there, f"all ranks are in attempt {attempt}")
    return {env["ERNIEKIT_LAUNCH"] for env in found}


# Numbered on arrival, the lost machine has to miss its heartbeats first: ten seconds more.
@pytest.mark.parametrize("numbered", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_lost_machine_joins_again_where_the_others_are(tmp_path: Path, numbered: bool) -> None:
    common, words = two(), ("save_when_told", tmp_path, 0)
    stays = machine(tmp_path, common, 0, numbered, *words)
    wait_for_host(common.port)  # numbered on arrival: the first to come is the host of the store
    goes = machine(tmp_path, common, 1, numbered, *words)
    pids = [tmp_path / f"pid-{rank}" for rank in (0, 1)]
    first = launch_of(0, pids)
    here = 0 if "rank 0 of 2" in wait_for_words(stays, "rank ")[0] else 1
    goes.kill(signal.SIGKILL)
    assert goes.wait() == -9
    os.kill(int(pids[here].read_text()), signal.SIGKILL)  # as a collective with the lost rank would have ended it
    for path in pids:
        path.unlink()
    comes = machine(tmp_path, common, 1, numbered, *words)
    names = launch_of(1, pids)
    assert len(names) == 1, "the machine that came back takes part in the same launch"
    assert names == first
    for process in (stays, comes):
        process.kill(signal.SIGTERM)
    assert [stays.wait(), comes.wait()] == [75, 75], [stays.said(), comes.said()]
    assert [line for line in stays.said() if line.startswith("restart")] == ["restart 1 of 3 in 1 s"], "one is spent"
    assert all("attempt 1" in (tmp_path / "logs" / f"workerlog.{rank}").read_text() for rank in (0, 1))


def test_when_the_meeting_point_is_lost_the_others_stop(tmp_path: Path) -> None:
    common, words = two(), ("save_when_told", tmp_path, 0)
    goes, stays = [machine(tmp_path, common, node, True, *words) for node in (0, 1)]
    wait_for(tmp_path / "pid-0", tmp_path / "pid-1")
    goes.kill(signal.SIGKILL)
    began = time.monotonic()
    assert (goes.wait(), stays.wait()) == (-9, 1)
    assert time.monotonic() - began < LATE_S
    assert stays.said()[-3].startswith("error: the other machines are gone")
    assert not alive(int((tmp_path / "pid-1").read_text()))


def test_a_machine_that_never_comes_is_an_error_with_the_numbers(tmp_path: Path) -> None:
    launch = replace(two(), node_rank=0, log_dir=tmp_path / "logs", join_timeout_s=1.0)
    process = launcher(tmp_path, launch, "say_hello")
    assert process.wait() == 1
    said = "\n".join(process.said())
    assert "error: the machines could not connect" in said
    assert f"{launch.port}, 2 machines" in said
    assert "Traceback" not in said
