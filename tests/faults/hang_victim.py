"""A rank that trains a little and then hangs in the way it is told to. Started by test_hangs.py, never imported."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from erniekit.train.watchdog import Watchdog

DOG: list[Watchdog] = []
HANGS_AT = 5  # the step: behind the first three, which may take ten times as long


def hung() -> None:
    """Tells when its last sign of life was: a machine that stands still after it changes nothing of that."""
    print(DOG[0]._beats.read().at, flush=True)


def trains(dog: Watchdog, work: Callable[[int], object] = lambda step: None) -> None:
    for step in range(1, HANGS_AT + 1):
        dog.phase("data")
        time.sleep(0.01)
        dog.phase("forward/backward")
        work(step)
        dog.beat(step)


def holds_the_lock(step: int) -> None:
    if step == HANGS_AT:
        hung()
        ctypes.PyDLL(None).sleep(3600)  # PyDLL keeps the interpreter lock, unlike CDLL


def sleeps(step: int) -> None:
    if step == HANGS_AT:
        hung()
        time.sleep(3600)


def naps(step: int) -> None:
    """Long enough for a report, and then it goes on."""
    if step == HANGS_AT:
        hung()
        if os.environ["NAP"] == "until told":
            sys.stdin.readline()
        elif os.environ["NAP"] == "suspended":
            for pid in (DOG[0]._beats.monitor, os.getpid()):
                os.kill(pid, signal.SIGSTOP)
        else:
            time.sleep(float(os.environ["NAP"]))


class NeverReturns:
    """A source of samples that stops answering in the middle, in a thread of the real loader."""

    def sample(self, index: int) -> object:
        import numpy as np

        from erniekit.data.types import Sample

        if index >= HANGS_AT - 1:
            self.never_returns()
        return Sample(np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32))

    def never_returns(self) -> None:
        hung()
        while True:
            time.sleep(3600)


class Stream:
    epochs = None

    def __getitem__(self, pack: int) -> list[tuple[int, int]]:
        return [(0, pack)]


def data_thread(dog: Watchdog) -> None:
    from erniekit.data.loader import BatchLoader

    batches = iter(BatchLoader(Stream(), [NeverReturns()], batch_size=1, num_workers=1, prefetch=0))
    dog.beat(0)
    for step in range(1, 100):
        dog.phase("data")
        next(batches)
        dog.phase("forward/backward")
        dog.beat(step)


def collective(dog: Watchdog, rank: int) -> None:
    import torch
    import torch.distributed as dist

    def work(step: int) -> None:
        if step == HANGS_AT and rank == 1:
            never_joins()
        dog.phase("collective")
        if step == HANGS_AT:
            hung()
        dist.all_reduce(torch.ones(1000))

    trains(dog, work)


def never_joins() -> None:
    hung()
    while True:
        time.sleep(3600)


def evaluates(dog: Watchdog) -> None:
    """Longer than the hard limit in a phase that may take long; then much longer, with signs of life."""
    trains(dog)
    dog.phase("eval")
    time.sleep(2.5 * dog.limits.hard_s)
    for _ in range(12):
        time.sleep(dog.limits.hard_s)
        dog.progress()


def prepare(kind: str, rank: int) -> None:
    """What takes its time on a busy machine and is no hang: imports, and one rank's wait for the other's."""
    if kind == "data":
        from erniekit.data.loader import BatchLoader

        next(iter(BatchLoader(Stream(), [NeverReturns()], batch_size=1)))
    elif kind == "collective":
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=2)
        dist.all_reduce(torch.ones(1))


def main(kind: str, folder: str, rank: str, soft: str, hard: str) -> None:
    prepare(kind, int(rank))
    with Watchdog(Path(folder), int(rank), float(soft), float(hard)) as dog:
        DOG.append(dog)
        dog.phase("prepare")
        while not dog._beats.monitor:
            time.sleep(0.01)
        print("monitor", dog._beats.monitor, flush=True)
        if kind == "data":
            data_thread(dog)
        elif kind == "collective":
            collective(dog, int(rank))
        elif kind == "eval":
            evaluates(dog)
        else:
            trains(dog, {"lock": holds_the_lock, "sleep": sleeps, "nap": naps}[kind])
            time.sleep(float(os.environ.get("LINGER", "0.5")))  # for the watchdog to say that it goes on
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
