"""What goes wrong in a rank, and the journal that proves it did. Installed by rank_server.py in a forked rank, in front
of the real `erniekit train`: no line of src/ knows of it."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from erniekit.checkpoint import gather, rank_files, writer
from erniekit.checkpoint.collective import CollectiveSaves
from erniekit.checkpoint.gather import Exchange
from erniekit.checkpoint.manager import CheckpointManager, step_of
from erniekit.optim.adamw import AdamW
from erniekit.parallel.engine import Engine
from erniekit.parallel.gradients import local
from erniekit.recipes import finish, stage
from erniekit.recipes.built import Built
from erniekit.train.eval_hook import EvalHook
from erniekit.train.trainer import Trainer

AFTER_THE_STEP = ("save", "hooks", "eval", "end")  # phases in which the step's number is booked already


@dataclass(frozen=True)
class Fault:
    rank: int
    step: int
    # A phase of the loop | batch | file | answer | part (written, not told yet) | loss | gradient | weights (after the
    # step) | compute
    at: str
    do: str  # kill | term | hang | wait | fail | full | nan | flip | slow
    call: int = 1  # of batch, file and answer: which one within the evaluation or the save of this step; 0: every one
    code: int = 0  # of fail: the errno
    until: int = 0  # the last step, where it is not `step`, or `step` for more than once
    seconds: float = 0.0  # of wait

    def here(self, at: str, step: int) -> bool:
        return self.at == at and self.step <= step <= (self.until or self.step)


class Journal:
    """One JSON object a line, on disk before the next thing happens: it outlives a SIGKILL."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def note(self, kind: str, **values: Any) -> None:
        os.write(self.fd, (json.dumps({"kind": kind, "time": time.monotonic(), **values}) + "\n").encode())


class Faulty:
    def __init__(self, faults: Sequence[Fault], journal: Journal) -> None:
        self.faults, self.journal = faults, journal
        self.step = self.saving = self.answers = 0
        self.done: set[Fault] = set()

    def strike(self, at: str, step: int, call: int = 1) -> Fault | None:
        """The fault that is due here, once for each; it is in the journal before it happens."""
        for fault in self.faults:
            if fault.here(at, step) and fault.call in (0, call) and (fault.until or fault not in self.done):
                self.done.add(fault)
                self.journal.note("fault", **asdict(fault), on=step, thread=threading.current_thread().name)
                return fault
        return None

    def happens(self, fault: Fault | None) -> None:
        if fault is None:
            return
        if fault.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.do == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        elif fault.do == "hang":
            never_joins()
        elif fault.do == "wait":
            time.sleep(fault.seconds)
        elif fault.do == "fail":
            raise OSError(fault.code, os.strerror(fault.code))
        elif fault.do == "full":  # the file size that this process may write: the library's own writes fail, too
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))


def never_joins() -> None:
    while True:
        time.sleep(3600)


class Disk(writer.FileOps):
    """Every change of the disk that this rank makes for a checkpoint, counted within a save."""

    CALLS = ("mkdir", "create", "write", "open", "extend", "write_at", "sync", "rename", "unlink", "rmdir")

    def __init__(self, faulty: Faulty) -> None:
        self.faulty, self.step, self.calls = faulty, 0, 0

    def __getattribute__(self, name: str) -> Any:
        call = super().__getattribute__(name)
        return call if name not in Disk.CALLS else lambda *args: self._counted(name, call, args)

    def _counted(self, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self.calls += 1
        self.faulty.happens(self.faulty.strike("file", self.step, self.calls))
        if name == "rename" and args[1].name.startswith(".del-"):
            self.faulty.journal.note("deleting", step=step_of(args[0]))
        out = call(*args)
        if name == "rename" and (step := step_of(args[1])) is not None:
            self.faulty.journal.note("published", step=step, calls=self.calls)
        return out


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """`wrapper(plain, *args)` in place of owner.name(*args)."""
    plain = getattr(owner, name)
    setattr(owner, name, lambda *args, **keys: wrapper(plain, *args, **keys))


def install(
    rank: int, faults: Sequence[dict[str, Any]], journal: Path, two_files: bool = False, together: bool = False
) -> None:
    if two_files:
        rank_files.TWO_FROM = 1
    if together:
        gather.ONE_FILE = 1
    mine = [fault for each in faults if (fault := Fault(**each)).rank == rank]
    faulty = Faulty(mine, Journal(journal))
    _in_the_loop(faulty)
    _in_an_evaluation(faulty)
    _in_a_save(faulty)
    _in_numbers(faulty)


def _in_the_loop(faulty: Faulty) -> None:
    note = faulty.journal.note

    def phase(plain: Callable, trainer: Trainer, name: str) -> None:
        plain(trainer, name)
        faulty.step = trainer.state.step + (name not in AFTER_THE_STEP)
        faulty.happens(faulty.strike(name, faulty.step))

    def booked(plain: Callable, trainer: Trainer, result: Any, micro: Any) -> bool:
        damaged = faulty.strike("weights", result.step)
        if damaged:
            damage(next(iter(trainer.step.engine.model.parameters())), damaged.do)
        going_back = plain(trainer, result, micro)
        s = trainer.state
        counters = (s.step, s.updates, s.skipped_steps, s.bad_in_a_row, s.rollbacks)
        note("step", step=result.step, loss=result.loss, applied=result.applied, counters=counters)
        return going_back

    def close_run(plain: Callable, cfg: Any, output: Path, built: Built, trainer: Trainer, *rest: Any) -> Any:
        digest, finite = hashlib.sha256(), True
        for name, param in built.parameters():
            digest.update(name.encode() + local(param.detach()).contiguous().numpy().tobytes())
            finite = finite and bool(param.isfinite().all())
        s = trainer.state
        counters = (s.step, s.updates, s.skipped_steps, s.bad_in_a_row, s.rollbacks, s.packs, s.loss_sum)
        note("end", weights=digest.hexdigest(), finite=finite, counters=counters)
        return plain(cfg, output, built, trainer, *rest)

    around(Trainer, "phase", phase)
    around(Trainer, "_count", booked)
    around(finish, "close_run", close_run)


def _in_an_evaluation(faulty: Faulty) -> None:
    calls = 0

    def evaluation(plain: Callable, hook: EvalHook, trainer: Trainer) -> None:
        nonlocal calls
        calls = 0
        plain(hook, trainer)

    def batch(plain: Callable, engine: Engine, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        faulty.journal.note("batch", step=faulty.step, call=calls)
        faulty.happens(faulty.strike("batch", faulty.step, calls))
        return plain(engine, batch)

    around(EvalHook, "_evaluate", evaluation)
    around(Engine, "evaluate", batch)


def _in_a_save(faulty: Faulty) -> None:
    disk = writer.ops = Disk(faulty)

    def publish(plain: Callable, manager: CheckpointManager, step: int, *rest: Any) -> None:
        disk.step, disk.calls = step, 0
        try:
            plain(manager, step, *rest)
        finally:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    def save(plain: Callable, saves: CollectiveSaves, step: int, *rest: Any, **keys: Any) -> Any:
        saves.wait()  # as it does itself: the one before must be settled under its own number
        faulty.saving, faulty.answers = step, 0
        disk.step, disk.calls = step, 0
        return plain(saves, step, *rest, **keys)

    def settle(plain: Callable, saves: CollectiveSaves, *rest: Any, **keys: Any) -> Any:
        before = saves.misses
        try:
            return plain(saves, *rest, **keys)
        finally:
            ok = saves.misses <= before
            faulty.journal.note("settled", step=faulty.saving, misses=saves.misses, ok=ok, during=faulty.step)

    def answer(plain: Callable, exchange: Exchange, name: str) -> None:
        faulty.answers += 1
        faulty.happens(faulty.strike("answer", faulty.saving, faulty.answers))
        plain(exchange, name)

    def write_own(plain: Callable, exchange: Exchange, *rest: Any) -> Any:
        told = plain(exchange, *rest)
        faulty.happens(faulty.strike("part", faulty.saving))
        return told

    around(CheckpointManager, "_publish", publish)
    around(CollectiveSaves, "save", save)
    around(CollectiveSaves, "_settle", settle)
    around(Exchange, "_send_part", answer)
    around(Exchange, "_write_own", write_own)


def _in_numbers(faulty: Faulty) -> None:
    def loss(plain: Callable, *args: Any) -> torch.Tensor:
        began = time.perf_counter()
        value = plain(*args)
        if torch.is_grad_enabled() and faulty.strike("compute", faulty.step):
            time.sleep(12 * (time.perf_counter() - began))  # four times forward and backward, which takes twice as long
        return value * float("nan") if torch.is_grad_enabled() and faulty.strike("loss", faulty.step) else value

    def gradients(plain: Callable, optimizer: AdamW) -> dict[str, torch.Tensor]:
        grads = plain(optimizer)
        if faulty.strike("gradient", faulty.step):
            next(iter(grads.values())).view(-1)[0] = float("inf")
        return grads

    def gradient_of(plain: Callable, optimizer: AdamW, name: str) -> torch.Tensor | None:
        """Of data-parallel ranks, before it is added to the others'."""
        grad = plain(optimizer, name)
        if grad is not None and faulty.strike("gradient", faulty.step):
            grad.view(-1)[0] = float("inf")
        return grad

    around(stage, "causal_loss", loss)
    around(AdamW, "gradients", gradients)
    around(AdamW, "gradient_of", gradient_of)


def damage(param: torch.Tensor, how: str) -> None:
    held = local(param.detach()).view(-1)
    if how == "nan":
        held[0] = float("nan")
    else:  # in the middle of the mantissa: an update does not round it away
        held.view(torch.int32)[0] ^= 1 << 12
