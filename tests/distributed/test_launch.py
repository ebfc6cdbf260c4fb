"""The launcher with real processes: logs, failures, restarts, signals, and several launchers as several machines."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from erniekit.cli import launch_agent
from erniekit.cli.launch import Launch, start

WORKER = str(Path(__file__).with_name("launch_worker.py"))
LEFT_S = 15.0  # the promise: how long the others may take to leave

LAUNCHER = """
import sys
from pathlib import Path
from erniekit.cli.launch import start, Launch
from erniekit.cli import main as cli
def go(args): return start(eval(args[0]), args[1:])
cli.COMMANDS["go"] = cli.Command("__main__:go", "x", "x", ("x",))
sys.exit(cli.main(["go", *sys.argv[1:]]))
"""


@pytest.fixture
def ranks(tmp_path: Path, capfd) -> Callable[..., tuple[int, str, str]]:
    """ranks("what", args...) -> exit code, stdout, stderr of two ranks started from this process."""

    def go(*words: object, **keys: object) -> tuple[int, str, str]:
        before = dict(os.environ)
        launch = Launch(**{"nproc": 2, "log_dir": tmp_path / "logs", "max_restarts": 0, **keys})
        code = start(launch, [sys.executable, WORKER, *map(str, words)])
        assert dict(os.environ) == before
        seen = capfd.readouterr()
        return code, seen.out, seen.err

    return go


def launcher(launch: Launch, *words: object, **popen: object) -> subprocess.Popen:
    """A launcher in a process of its own."""
    text = repr(launch).replace("PosixPath", "Path")
    command = [sys.executable, "-c", LAUNCHER, text, sys.executable, WORKER, *map(str, words)]
    keys = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, **{**keys, **popen})


def wait_for(*paths: Path, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not all(path.exists() and path.stat().st_size for path in paths):
        assert time.monotonic() < until, f"{paths} did not come"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_every_rank_has_its_log_and_rank_0_the_screen(ranks: Callable, tmp_path: Path) -> None:
    code, out, err = ranks("say_hello")
    assert code == 0
    assert out == "rank 0 of 2, attempt 0\n"
    assert err.splitlines() == [f"ranks 0 to 1; what each says: {tmp_path}/logs/workerlog.N", "hello"]
    assert (tmp_path / "logs" / "workerlog.1").read_text() == "rank 1 of 2, attempt 0\nhello\n"


def test_a_users_error_is_shown_once_in_full_and_never_restarted(ranks: Callable, tmp_path: Path) -> None:
    began = time.monotonic()
    code, _, err = ranks("user_error", tmp_path, max_restarts=3)
    assert code == 2
    assert err.splitlines()[1:] == ["error: no rows", "where: a.jsonl", "fix:   add some"]
    assert time.monotonic() - began < LEFT_S
    assert "error: no rows" in (tmp_path / "logs" / "workerlog.1").read_text()


def test_a_crash_shows_its_traceback_first_and_is_restarted(ranks: Callable, tmp_path: Path) -> None:
    code, out, err = ranks("crash_once", tmp_path, max_restarts=1)
    assert code == 0
    lines = err.splitlines()[1:]
    assert lines[0] == "error: ZeroDivisionError: oops"
    assert 'raise ZeroDivisionError("oops")' in err
    assert "restart 1 of 1 in 1 s" in lines[-1]
    assert "workerlog.1" in lines[-2]
    assert "SIGTERM" not in err
    assert "ChildFailedError" not in err
    assert out.splitlines() == ["rank 0 of 2, attempt 0", "rank 0 of 2, attempt 1"]
    assert "about to fail" in (tmp_path / "logs" / "workerlog.1.attempt-1").read_text()
    assert len(list(tmp_path.glob("attempt-*"))) == 4


def test_after_the_last_restart_the_ranks_own_code_is_returned(
    ranks: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_agent, "BACK_OFF_S", 0.1)
    code, _, err = ranks("die", tmp_path, 70, max_restarts=1)
    assert code == 70
    assert err.count("error: rank 1 ended with exit code 70") == 2
    assert len(list(tmp_path.glob("attempt-1-*"))) == 2


def test_a_rank_that_does_not_hear_is_killed_with_what_it_started(
    ranks: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch_agent.LEAVE_S < LEFT_S - 5
    monkeypatch.setattr(launch_agent, "LEAVE_S", 0.5)
    code, _, _ = ranks("deaf", tmp_path)
    assert code == 1
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert not any(map(alive, pids))


def test_the_others_may_finish_their_save_when_one_rank_has_left(ranks: Callable, tmp_path: Path) -> None:
    code, _, err = ranks("one_leaves_early", tmp_path, max_restarts=3)
    assert code == 75
    assert (tmp_path / "saved").exists(), "rank 0 was still saving when rank 1 left"
    assert err.splitlines()[1:] == ["saved by rank 0"]


def test_a_killed_rank_takes_the_run_down_and_the_restart_goes_on(ranks: Callable, tmp_path: Path) -> None:
    code, out, err = ranks("add_ranks", tmp_path, 6, 1, max_restarts=1)
    assert code == 0, err
    assert "error: rank 1 was ended by SIGKILL" in err.splitlines()[1]
    killed, left = (float((tmp_path / name).read_text()) for name in ("killed", "left-0"))
    assert 0 <= left - killed < LEFT_S
    print(f"rank 0 noticed {left - killed:.2f} s after rank 1 was killed")
    for rank in (0, 1):
        steps = [tuple(word.split(":")) for word in (tmp_path / f"steps-{rank}").read_text().split()]
        assert [(step, attempt) for step, attempt, _ in steps] == [(str(k), "0" if k < 3 else "1") for k in range(6)]
        assert {total for _, _, total in steps} == {"3"}
    assert out.splitlines()[-1] == "sum 3"


def test_sigterm_to_the_launcher_lets_every_rank_save(tmp_path: Path) -> None:
    process = launcher(Launch(2, log_dir=tmp_path / "logs"), "save_when_told", tmp_path, 0.5)
    wait_for(tmp_path / "pid-0", tmp_path / "pid-1")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 75
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["SIGTERM", "SIGTERM"]
    assert err.splitlines()[1:] == ["saved by rank 0"]


def test_a_second_interrupt_ends_all_at_once(tmp_path: Path) -> None:
    process = launcher(Launch(2, log_dir=tmp_path / "logs"), "save_when_told", tmp_path, 30)
    wait_for(tmp_path / "pid-0", tmp_path / "pid-1")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 2
    assert process.returncode == 130
    assert "stopped by SIGINT without a save" in err
    assert not list(tmp_path.glob("saved-*"))


def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    process = launcher(Launch(2, log_dir=tmp_path / "logs"), "user_error", tmp_path)
    process.terminate()
    process.communicate(timeout=30)
    process = launcher(Launch(2, log_dir=tmp_path / "logs"), "save_when_told", tmp_path, 0)
    wait_for(tmp_path / "pid-0", tmp_path / "pid-1")
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in (0, 1)]
    assert all(map(alive, pids))
    process.kill()
    process.communicate(timeout=30)
    until = time.monotonic() + LEFT_S
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(alive, pids))


def test_on_a_terminal_rank_0_draws_one_bar_and_its_log_is_plain(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    keys = dict(stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"})
    process = launcher(Launch(2, log_dir=tmp_path / "logs"), "bar", **keys)
    os.close(theirs)
    screen = b""
    while True:
        if not select.select([ours], [], [], 60)[0]:
            break
        try:
            data = os.read(ours, 65536)
        except OSError:  # the last writer has left
            break
        screen += data
    os.close(ours)
    assert process.wait(timeout=30) == 0
    text = screen.decode()
    assert "isatty True True" in text
    assert "a line above the bar" in text
    assert len(re.findall(r"\d+%\|[^|\r\n]*\| \d+/20", text)) > 3, "it is drawn over and over"
    assert text.count("20/20") >= 1
    log = (tmp_path / "logs" / "workerlog.0").read_text()
    assert "\r" not in log
    assert "\x1b" not in log
    assert "20/20" in log.splitlines()[-1]
    assert (tmp_path / "logs" / "workerlog.1").read_text().count("isatty False") == 1


# --- several launchers on this machine, as several machines


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def two_machines(tmp_path: Path, numbered: bool, *words: object, **keys: object) -> list[tuple[int, str, str]]:
    port, out = free_port(), []
    processes = [
        launcher(
            Launch(
                **{
                    "nproc": 1,
                    "nnodes": 2,
                    "node_rank": node if numbered else None,
                    "port": port,
                    "log_dir": tmp_path / f"logs-{node}",
                    "join_timeout_s": 60.0,
                    **keys,
                }
            ),
            *words,
        )
        for node in (0, 1)
    ]
    for process in processes:
        seen = process.communicate(timeout=90)
        out.append((process.returncode, *seen))
    return out


def test_numbered_machines_share_a_users_error_and_do_not_restart(tmp_path: Path) -> None:
    began = time.monotonic()
    (code0, _, err0), (code1, _, err1) = two_machines(tmp_path, True, "user_error", tmp_path)
    assert (code0, code1) == (2, 2), (err0, err1)
    assert err0.splitlines()[0].startswith("rank 0 of 2 on 2 machines")
    assert err0.splitlines()[1:] == err1.splitlines()[1:] == ["error: no rows", "where: a.jsonl", "fix:   add some"]
    print(f"both machines left after {time.monotonic() - began:.1f} s")


def test_machines_numbered_on_arrival_restart_together(tmp_path: Path) -> None:
    results = two_machines(tmp_path, False, "crash_once", tmp_path, max_restarts=1)
    assert [code for code, _, _ in results] == [0, 0], results
    assert len(list(tmp_path.glob("attempt-*"))) == 4
    for _, _, err in results:
        assert "error: ZeroDivisionError: oops" in err
        assert err.count("restart 1 of 1") == 1


def test_a_machine_that_never_comes_is_an_error_with_the_numbers(tmp_path: Path) -> None:
    launch = Launch(1, nnodes=2, node_rank=0, port=free_port(), log_dir=tmp_path / "logs", join_timeout_s=2.0)
    process = launcher(launch, "say_hello")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the machines did not meet" in err
    assert "2 machines" in err
    assert "Traceback" not in err
