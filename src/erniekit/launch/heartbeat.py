"""Which machines of a run are still there: each launcher's heartbeat, and sockets that notice a silent network.

Used by launch/nodes.py. A machine that is switched off, or whose cable is pulled, closes no connection.
"""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

BEAT_INTERVAL_S = 1.0  # between two heartbeats of a launcher
QUIET_S = 4.0  # silence of a launcher after which it is to blame, when ranks have lost touch with a peer
LOST_S = 30.0  # silence after which a machine is lost, whatever the ranks report
DONE = "done"  # the last beat of a launcher whose ranks have finished
# TCP: a probe after a third of LOST_S without data, then one every sixth; after LOST_S the connection is closed.
_PROBES = ("TCP_KEEPIDLE", 1 / 3), ("TCP_KEEPINTVL", 1 / 6)
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Machine:
    """As its launcher introduces itself to the others."""

    number: int
    of: int
    host: str
    address: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        return f"machine {self.number} of {self.of}, {self.host} ({self.address}), {ranks}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Machine:
        data = json.loads(text)
        return cls(**{**data, "ranks": tuple(data["ranks"])})


def notice_silence(port: int) -> None:
    """Every connection of this process to `port` fails after LOST_S without an answer; by itself it waits for ever.

    torch's store has no such setting, so the options are put on its sockets from outside.
    """
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # closed meanwhile, not connected, or a system without these options
            fd = int(name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as ours:
                if ours.family not in (socket.AF_INET, socket.AF_INET6) or ours.getpeername()[1] != port:
                    continue
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, part in _PROBES:
                    if hasattr(socket, option):
                        ours.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), max(1, round(LOST_S * part)))
                if hasattr(socket, "TCP_KEEPCNT"):
                    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
                if hasattr(socket, "TCP_USER_TIMEOUT"):  # a question that is never acknowledged
                    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(LOST_S * 1000))


class Heartbeat:
    """A thread that writes and reads beats. Its store is a connection of its own: the agent's may wait in C++ for long.

    `announce` before all have agreed on an attempt, `start` after; so every beat is there when it is read.
    """

    def __init__(self, store: Store, me: int, count: int, launcher: str) -> None:
        """launcher: its id; another one under the same number is a machine that came back."""
        self.store, self.me, self.count, self._launcher = store, me, count, launcher
        self._names: list[str] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._final_beat = ""
        self.looks = 0  # how often the others' beats were read
        self._looked = 0.0  # monotonic: when the others' beats were last read
        self._changed_at: list[float] = []  # monotonic, by machine: when its beat last changed
        self._beats: list[str] = []
        self._first: list[str] = []  # the launchers at the start

    def announce(self, attempt: int) -> None:
        self._names = [f"beat/{attempt}/{node}" for node in range(self.count)]
        self.store.set(self._names[self.me], f"{self._launcher}:0")

    def launch_name(self) -> str:
        """The id of the first launcher, kept in the store for as long as the launch lives."""
        return self.store.compare_set("launch", "", self._launcher).decode()

    def start(self) -> None:
        self._look()
        self._first = [beat.partition(":")[0] for beat in self._beats]
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def silent(self, seconds: float) -> list[int]:
        """The machines without a new beat for so long, of those that are not done. None, while no beats can be read."""
        with self._lock:
            return [
                node
                for node, at in enumerate(self._changed_at)
                if node != self.me and self._looked - at >= seconds and not self._beats[node].endswith(DONE)
            ]

    def replaced(self) -> list[int]:
        """The machines whose launcher was restarted."""
        with self._lock:
            return [n for n, beat in enumerate(self._beats) if beat.partition(":")[0] != self._first[n]]

    def done(self) -> None:
        """This machine has nothing more to do: its silence from here on is no loss."""
        self._final_beat = DONE

    def close(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        count = 0
        while not self._stop.wait(BEAT_INTERVAL_S):
            count += 1
            try:
                self.store.set(self._names[self.me], f"{self._launcher}:{self._final_beat or count}")
                self._look()
            except RuntimeError:  # the meeting point is lost: the agent finds out on its own connection
                return

    def _look(self) -> None:
        beats = [beat.decode() for beat in self.store.multi_get(self._names)]
        now = time.monotonic()
        with self._lock:
            if self._beats:
                changed = [beat != before for beat, before in zip(beats, self._beats, strict=True)]
                self._changed_at = [now if new else at for new, at in zip(changed, self._changed_at, strict=True)]
            else:
                self._changed_at = [now] * self.count
            self._beats, self._looked = beats, now
            self.looks += 1


def newest_checkpoint(output: Path) -> str:
    """Its name; "" where this machine's disk has none, or cannot be read now."""
    try:
        found = [(int(match[1]), p) for p in output.glob("checkpoint-*") if (match := _CHECKPOINT.fullmatch(p.name))]
        whole = [(step, path.name) for step, path in found if (path / "MANIFEST.json").is_file()]
    except OSError:
        return ""
    return max(whole)[1] if whole else ""
