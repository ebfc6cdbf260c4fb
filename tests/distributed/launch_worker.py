"""A rank for the launcher's tests: does what its first word says, by way of the real `erniekit` command."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from erniekit.cli import launch_rank
from erniekit.cli import main as cli
from erniekit.cli.commands import COMMANDS, Command
from erniekit.errors import DataError, Preempted

RANK = int(os.environ["RANK"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def play(words: list[str]) -> int:
    print(f"rank {RANK} of {os.environ['WORLD_SIZE']}, attempt {ATTEMPT}", flush=True)
    return globals()[words[0]](*words[1:]) or 0


def say_hello() -> None:
    print("hello", file=sys.stderr)


def user_error(folder: str) -> None:
    """Rank 1's fault; rank 0 would go on for a minute."""
    all_here(folder)
    if RANK == 1:
        raise DataError("no rows", where="a.jsonl", fix="add some")
    wait_for_the_end(folder)


def all_here(folder: str) -> None:
    """Leaves a file, and returns when every rank of this attempt has: then the fault comes to a full house."""
    (Path(folder) / f"attempt-{ATTEMPT}-rank-{RANK}").write_text(os.environ["ERNIEKIT_LAUNCH"])
    until = time.monotonic() + 60
    while len(list(Path(folder).glob(f"attempt-{ATTEMPT}-*"))) < int(os.environ["WORLD_SIZE"]):
        assert time.monotonic() < until
        time.sleep(0.01)


def crash_once(folder: str) -> None:
    all_here(folder)
    if ATTEMPT == 0:
        if RANK == 1:
            print("about to fail", flush=True)
            raise ZeroDivisionError("oops")
        wait_for_the_end(folder)


def die(folder: str, code: str) -> None:
    all_here(folder)
    if RANK == 1:
        os._exit(int(code))
    wait_for_the_end(folder)


def deaf(folder: str) -> None:
    """Rank 1 crashes; rank 0 hears no SIGTERM, like one stuck in a collective, and has a child of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready = Path(folder) / "pids"
    if RANK == 0:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        ready.with_suffix(".tmp").write_text(f"{os.getpid()} {child}")
        ready.with_suffix(".tmp").rename(ready)
        time.sleep(60)
    while not ready.exists():
        time.sleep(0.01)
    os._exit(1)


def wait_for_the_end(folder: str) -> None:
    (Path(folder) / f"pid-{RANK}").write_text(str(os.getpid()))
    time.sleep(60)


def save_when_told(folder: str, seconds: str) -> None:
    """Like a trainer: a signal asks for a save, which takes its time; a second one ends it at once."""
    told: list[int] = []

    def hear(number: int, frame: object) -> None:
        if told:
            os._exit(128 + number)
        told.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hear)
    (Path(folder) / f"pid-{RANK}").write_text(str(os.getpid()))
    until = time.monotonic() + 60
    while not told and time.monotonic() < until:
        time.sleep(0.01)
    (Path(folder) / f"told-{RANK}").write_text("once")
    time.sleep(float(seconds))
    (Path(folder) / f"saved-{RANK}").write_text(signal.Signals(told[0]).name)
    raise Preempted(f"saved by rank {RANK}")


def never_leaves(folder: str) -> None:
    """Like one in a collective whose peer stands still: it is told, and gets to no save."""

    def hear(number: int, frame: object) -> None:
        (Path(folder) / f"told-{RANK}").write_text(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hear)
    wait_for_the_end(folder)


def one_leaves_early(folder: str) -> None:
    """Rank 1 is done with its part of the save before rank 0 is."""
    if RANK == 0:
        time.sleep(1.0)
        (Path(folder) / "saved").touch()
    raise Preempted(f"saved by rank {RANK}")


def one_is_stuck(folder: str) -> None:
    if RANK == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (Path(folder) / "stuck").touch()
        time.sleep(60)
    while not (Path(folder) / "stuck").exists():
        time.sleep(0.01)
    raise Preempted(f"saved by rank {RANK}")


def bar() -> None:
    from erniekit.track.progress import Progress

    print(f"isatty {sys.stdout.isatty()} {sys.stderr.isatty()}", flush=True)
    progress = Progress(20)
    for step in range(1, 21):
        time.sleep(0.02)
        progress.advance(step)
        if step == 10:
            print("a line above the bar", flush=True)
    progress.close()


def add_ranks(folder: str, steps: str = "1", victim: str = "") -> None:
    """Real collectives; progress is kept in a file. `victim` kills itself before step 3 of the first attempt."""
    (Path(folder) / f"began-{RANK}-{ATTEMPT}").write_text(str(time.time()))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    done = Path(folder) / f"steps-{RANK}"
    at = len(done.read_text().split()) if done.exists() else 0
    start = torch.tensor([at])
    dist.all_reduce(start, dist.ReduceOp.MIN)
    for step in range(int(start), int(steps)):
        if victim and int(victim) == RANK and step == 3 and ATTEMPT == 0:
            (Path(folder) / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.tensor([float(RANK + 1)])
        dist.all_reduce(total)
        with open(done, "a") as out:
            out.write(f"{step}:{ATTEMPT}:{total.item():.0f} ")
    dist.barrier()
    dist.destroy_process_group()
    print(f"sum {total.item():.0f}", flush=True)


def add_until_enough(folder: str) -> None:
    """Collectives without an end, until there is a file `enough`; every step and its attempt go into a file."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (Path(folder) / f"pid-{RANK}-{ATTEMPT}").write_text(str(os.getpid()))
    enough = torch.zeros(1)
    while not enough.item():
        enough = torch.tensor([float((Path(folder) / "enough").exists())])
        dist.all_reduce(enough)
        with open(Path(folder) / f"steps-{RANK}-{ATTEMPT}", "a") as out:
            out.write(".")
        time.sleep(0.02)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    launch_rank.die_with_the_launcher()
    COMMANDS["play"] = Command("__main__:play", "x", "x", ("x",))
    sys.exit(cli.main(["play", *sys.argv[1:]]))
