"""Why a rank ended: written by the rank besides its exit code, read and shown by the launcher. No torch in here.

`record` is called by cli/main.py in the rank; `read` and `first` by launch/agent.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from erniekit.errors import ErnieKitError, Preempted, RankLost
from erniekit.registry import foreign_code

USER, PREEMPTED, CRASH = "user", "preempted", "crash"
LAUNCHED = "ERNIEKIT_LAUNCHER"  # set for a rank to the process id of the launcher, which shows the rank's error
TAIL = 20  # lines of a traceback or a log that are shown
# In the errors of a rank whose peer died. Texts of gloo, NCCL and the store; there are no classes for them.
_PEER_TEXTS = ("by peer", "Broken pipe", "Socket closed", "NCCL", "Gloo", "gloo", "process group", "TCPStore")


@dataclass(frozen=True)
class Failure:
    rank: int
    code: int  # exit code; negative: the signal that ended it
    kind: str
    lines: tuple[str, ...]  # for the person, in full
    host: str = ""
    peer: bool = False  # reports only that another rank was lost
    at: float = 0.0  # seconds since the epoch; 0: unknown
    lost: tuple[int, ...] = ()  # the machines that are lost, where that is the failure

    @property
    def restartable(self) -> bool:
        return self.kind == CRASH

    @property
    def exit_code(self) -> int:
        return self.code if self.code >= 0 else 128 - self.code  # as a shell gives it

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        data = json.loads(text)
        return cls(**{**data, "lines": tuple(data["lines"]), "lost": tuple(data["lost"])})


def record(error: BaseException, code: int) -> bool:
    """Writes the error for the program that started this rank. True when that is our launcher, which shows it once."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        rank = int(os.environ.get("RANK", 0))
        failure = Failure(
            rank, code, _kind(error, code), _lines(error), socket.gethostname(), _peer(error), time.time()
        )
        message = "\n".join(failure.lines)
        # torchrun reads `message` of the same file, in its own shape
        data = {**asdict(failure), "message": {"message": message, "extraInfo": {"timestamp": str(int(failure.at))}}}
        try:
            Path(path).write_text(json.dumps(data), encoding="utf-8")
        except OSError:
            return False
    return bool(path and os.environ.get(LAUNCHED))


def read(rank: int, code: int, path: Path, log: Path) -> Failure:
    """The failure the rank recorded, or what its exit code and log show where it recorded none."""
    host = socket.gethostname()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        names = Failure.__dataclass_fields__
        found = Failure(**{**{n: data[n] for n in names if n in data}, "lines": tuple(data["lines"])})
        if found.kind == CRASH:
            lines = (*found.lines, f"where: rank {rank} on {host}, whole log in {log}")
            return Failure(**{**asdict(found), "lines": lines})
        return found
    except (OSError, ValueError, KeyError, TypeError):
        kind = {2: USER, 75: PREEMPTED}.get(code, CRASH)
        return Failure(rank, code, kind, _silent(rank, code, host, log), host)


def first(failures: Iterable[Failure]) -> Failure:
    """The cause among several: a user's error, then a death without record, then the earliest that blames no other."""

    def order(f: Failure) -> tuple[bool, bool, bool, float]:
        return f.kind != USER, f.kind == PREEMPTED, f.peer, f.rank if f.kind == PREEMPTED else f.at

    return min(failures, key=order)


def _kind(error: BaseException, code: int) -> str:
    if isinstance(error, Preempted):
        return PREEMPTED
    return USER if isinstance(error, ErnieKitError) and not isinstance(error, RankLost) else CRASH


def _lines(error: BaseException) -> tuple[str, ...]:
    if isinstance(error, ErnieKitError):
        return tuple(error.lines())
    if isinstance(error, Preempted):
        return tuple(str(error).splitlines()) or ("stopped by a signal; run the same command to resume",)
    trace = "".join(traceback.format_exception(error)).rstrip().splitlines()
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    code = foreign_code(error)
    return (f"error: {what}", *trace[-TAIL:], *([f"code:  {code.line}"] if code is not None else []))


def _peer(error: BaseException) -> bool:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(error, getattr(distributed, "DistError", ())):
        return True
    if isinstance(error, RankLost):
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(text in str(error) for text in _PEER_TEXTS)


def _silent(rank: int, code: int, host: str, log: Path) -> tuple[str, ...]:
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        what = f"error: rank {rank} was ended by {name}"
        if -code == signal.SIGKILL:
            what += "; when nobody sent it, the machine ran out of memory (dmesg says so)"
    else:
        what = f"error: rank {rank} ended with exit code {code}"
    try:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
    except OSError:
        tail = []
    return (what, *tail, f"where: rank {rank} on {host}, whole log in {log}")
