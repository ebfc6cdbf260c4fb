"""Real hangs: a data thread, a collective nobody joins, a held interpreter lock. Stacks are written, and it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from faults.results import fault
from support.clock import until
from support.processes import alive, stopped, wait_until_gone

pytestmark = pytest.mark.xdist_group("hangs")  # they take turns: their time-outs are short

VICTIM = Path(__file__).with_name("hang_victim.py")
SOFT, HARD = 1.0, 2.0  # seconds
LATER = 3.0  # on top of HARD, for the rank that is to end after the other, whichever of them stood still before
GRACE = 20.0  # on top of HARD, until the process is gone; for ever when nobody ends it


class Victim:
    """A started process: what it prints tells when it hung, and a thread notes when it ended."""

    def __init__(self, process: subprocess.Popen, folder: Path, rank: int) -> None:
        self.process, self.folder, self.rank = process, folder, rank
        self.hung_at = self.ended_at = 0.0
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._waiter.start()

    def _wait(self) -> None:
        self.process.wait()
        self.ended_at = time.monotonic()

    def monitor(self) -> int:
        assert self.process.stdout is not None
        word, pid = self.process.stdout.readline().split()
        assert word == "monitor"
        return int(pid)

    def hangs(self) -> None:
        """Waits until it does: when its last sign of life was, on the monotonic clock, one for all processes."""
        assert self.process.stdout is not None
        self.hung_at = float(self.process.stdout.readline())

    def says(self, words: str) -> None:
        """Waits until it does, on stderr; the line does not come again in `ends`."""
        assert self.process.stderr is not None
        assert words in self.process.stderr.readline()

    def ends(self) -> tuple[int, str]:
        """What still hangs until it is told goes on here."""
        try:
            _, errors = self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._waiter.join()
        return self.process.returncode, errors

    def report(self, step: int = 5) -> str:
        return (self.folder / "hangs" / f"rank-{self.rank}-step-{step}.txt").read_text()


def start(kind: str, folder: Path, rank: int = 0, soft: float = SOFT, hard: float = HARD, **env: str) -> Victim:
    command = [sys.executable, str(VICTIM), kind, str(folder), str(rank), str(soft), str(hard)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
    return Victim(process, folder, rank)


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Victim]:
    """All that hang for good, started together: they take seconds, and none of the processor."""
    folder = tmp_path_factory.mktemp
    both, dead, refused = folder("both"), folder("dead"), folder("refused")
    (dead / "hangs").mkdir()
    os.mkfifo(dead / "hangs" / "rank-0-step-5.txt")
    (refused / "hangs").write_text("a file, not a folder")
    keys = {"STORE": str(both / "store"), "TORCH_FR_BUFFER_SIZE": "50"}
    started = {f"rank {rank}": start("collective", both, rank, hard=HARD + rank * LATER, **keys) for rank in (0, 1)}
    started |= {"data": start("data", folder("data")), "lock": start("lock", folder("lock"))}
    return started | {"dead": start("sleep", dead), "refused": start("sleep", refused)}


def end_of(victim: Victim) -> tuple[int, int, str]:
    """(its monitor, its exit code, what it said), after it hung and was ended in time."""
    with fault("H1", "hung for good: data thread, collective, interpreter lock held, dead disk") as row:
        monitor = victim.monitor()
        victim.hangs()
        row.count = row.hits = 1
        code, errors = victim.ends()
        took = victim.ended_at - victim.hung_at
        assert HARD < took < HARD + GRACE
        row.note = f"hard time-out {HARD:.0f} s: gone after {took:.1f} s"
    return monitor, code, errors


def test_a_held_interpreter_lock_is_seen_and_ended_from_outside(victims: dict[str, Victim]) -> None:
    monitor, code, errors = end_of(victim := victims["lock"])
    assert code == -signal.SIGKILL, "no thread of it could end it"
    report = victim.report()
    assert "in holds_the_lock" in report
    assert "erniekit/train/watchdog.py" in report, "all threads, the waiting watchdog among them"
    assert "step 5, phase forward/backward; its threads do not answer" in report
    assert f"stacks in {victim.folder}/hangs/rank-0-step-5.txt" in errors
    assert "killed from outside" in errors
    wait_until_gone(monitor)


def test_a_dead_file_system_takes_the_watchdogs_thread_but_not_the_monitor(victims: dict[str, Victim]) -> None:
    """A pipe nobody reads stands for it: opening the report hangs the thread that writes it."""
    monitor, code, errors = end_of(victims["dead"])
    assert code == -signal.SIGKILL
    assert "its threads do not answer" in errors
    wait_until_gone(monitor)


def test_stacks_that_cannot_be_written_go_to_stderr(victims: dict[str, Victim]) -> None:
    _, code, errors = end_of(victims["refused"])
    assert code == 70
    assert "could not be written" in errors
    assert "in sleeps" in errors


def test_a_data_thread_that_never_returns_is_named_and_the_process_ends_for_a_restart(
    victims: dict[str, Victim],
) -> None:
    monitor, code, errors = end_of(victim := victims["data"])
    assert code == 70
    report = victim.report()
    assert "in never_returns" in report
    assert "erniekit-data" in report, "threads by name"
    found = re.search(r"rank 0 made no progress for (\d+\.\d) s at step 5, phase data", report)
    assert found
    assert float(found[1]) >= SOFT
    assert f"step 5, phase data; stacks in {victim.folder}/hangs/rank-0-step-5.txt" in errors
    assert "ending with code 70" in errors
    wait_until_gone(monitor)


def test_a_rank_that_never_enters_a_collective_is_found_on_both_sides(victims: dict[str, Victim]) -> None:
    # Whoever ends first breaks the other's connection: the one in the collective would then end by that error.
    waiting, missing = victims["rank 0"], victims["rank 1"]
    assert end_of(waiting)[1] == 70
    assert end_of(missing)[1] == 70
    report = missing.report()
    assert "in never_joins" in report
    assert "phase forward/backward" in report
    report = waiting.report()
    assert "in all_reduce" in report
    assert "phase collective" in report
    assert "gloo:all_reduce [[1000]] of default_pg: not done" in report, "torch's flight recorder"


@pytest.mark.full
def test_a_rank_that_comes_back_goes_on_and_long_phases_are_left_alone(tmp_path: Path) -> None:
    nap = start("nap", tmp_path / "nap", hard=60, NAP="1.6", LINGER="3")
    evaluation = start("eval", tmp_path / "eval", soft=0.9, hard=1.0)
    nap.monitor()
    nap.hangs()
    code, errors = nap.ends()
    assert code == 0
    assert "in naps" in nap.report()
    assert "rank 0 continues: step 6" in errors
    code, errors = evaluation.ends()
    assert (code, errors) == (0, ""), "2.5 x hard without a sign of life, 12 x hard with some"
    assert not (tmp_path / "eval").exists(), "nothing to report, nothing written"


def test_the_monitor_never_outlives_its_rank_and_its_own_end_is_told(tmp_path: Path) -> None:
    naps = ("600", "0", "until told")
    killed, ending, alone = (start("nap", tmp_path, NAP=nap, soft=120, hard=600) for nap in naps)
    monitors = [victim.monitor() for victim in (killed, ending, alone)]
    alone.hangs()
    os.kill(monitors[2], signal.SIGKILL)
    killed.hangs()
    for word in (signal.SIGTERM, signal.SIGINT):  # to the whole group, meant for the rank: it may hang while saving
        os.kill(monitors[0], word)
    time.sleep(0.2)  # for it to obey
    assert alive(monitors[0])
    killed.process.kill()
    wait_until_gone(monitors[0])
    killed.ends()
    assert ending.ends()[0] == 0
    wait_until_gone(monitors[1])
    alone.says("the monitor process of rank 0 ended (-9); only the thread watches")
    assert alone.ends() == (0, "")


def test_a_suspended_job_is_not_a_hang(tmp_path: Path) -> None:
    victim = start("nap", tmp_path, soft=1.8, hard=2.0, NAP="suspended")  # by itself, however late we are
    both = (victim.process.pid, victim.monitor())
    until(lambda: all(map(stopped, both)), "both stand still")
    time.sleep(2.5)
    for pid in both:
        os.kill(pid, signal.SIGCONT)
    code, errors = victim.ends()
    assert (code, errors) == (0, ""), "2.5 s of standing still are beyond both limits, and excused"
