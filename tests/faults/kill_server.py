"""One warm process, a fork per trial, SIGKILL at a chosen moment: importing torch for each kill would take minutes.
Run as a script by test_kill_during_save.py; leaves its counts in result.json for the test to judge."""

from __future__ import annotations

import argparse
import base64
import functools
import json
import os
import random
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save, save_file
from torch import nn

from erniekit.checkpoint import manifest, writer
from erniekit.checkpoint.lock import LOCK
from erniekit.checkpoint.manager import CheckpointManager, step_of
from erniekit.errors import CheckpointError

STEPS, SAVE_EVERY = 30, 2


class Training:
    """A tiny real run: dropout draws from the global generator, AdamW keeps two moments and a step per tensor."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 16))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step = 0

    def advance(self) -> str:
        self.step += 1
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(self.step))
        loss = nn.functional.mse_loss(self.model(x), x.flip(1))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item().hex()

    def writer(self, through_seam: bool) -> writer.Write:
        """Copies the state now and writes it later, as a background save must."""
        model = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        moments = {
            f"{i}.{key}": tensor.clone()
            for i, state in self.optimizer.state_dict()["state"].items()
            for key, tensor in state.items()
        }
        state = {"step": self.step, "rng": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()}

        def write(folder: Path) -> dict[str, manifest.FileRecord]:
            if through_seam:  # every system call of the save can then be the last one
                writer.write_file(folder / "model.safetensors", pieces(save(model), 4096))
            else:
                save_file(model, folder / "model.safetensors")
            optimizer = writer.write_file(folder / "optimizer.safetensors", pieces(save(moments), 8192))
            writer.write_file(folder / "state.json", [json.dumps(state).encode()])
            return {"optimizer.safetensors": optimizer}

        return write

    def load(self, folder: Path) -> None:
        self.model.load_state_dict(load_file(folder / "model.safetensors"))
        whole = self.optimizer.state_dict()
        whole["state"] = {}
        for name, tensor in load_file(folder / "optimizer.safetensors").items():
            i, key = name.split(".")
            whole["state"].setdefault(int(i), {})[key] = tensor
        self.optimizer.load_state_dict(whole)
        state = json.loads((folder / "state.json").read_text())
        self.step = state["step"]
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state["rng"])), dtype=torch.uint8))


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


class Journal(writer.FileOps):
    """Appends what the run did to a file that outlives it: losses, publications, deletions (before they begin)."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, kind: str, step: int, value: str = "-") -> None:
        os.write(self.fd, f"{kind} {step} {value}\n".encode())

    def rename(self, source: Path, target: Path) -> None:
        if target.name.startswith(".del-"):
            self.note("deleting", int(source.name.split("-")[1]))
        super().rename(source, target)
        if (step := step_of(target)) is not None:
            self.note("published", step)


class KillAt(writer.FileOps):
    """SIGKILL of this very process after its i-th change of the disk, or after `half` of it when it is a write."""

    CALLS = ("mkdir", "create", "write", "sync", "rename", "unlink", "rmdir")

    def __init__(self, at: int, half: bool = False) -> None:
        self.at, self.half = at, half
        self.calls: list[str] = []

    def __getattribute__(self, name: str):
        call = super().__getattribute__(name)
        if name not in KillAt.CALLS:
            return call

        def counted(*args):
            self.calls.append(name)
            now = len(self.calls) == self.at
            done = call(args[0], args[1][: len(args[1]) // 2]) if now and self.half else call(*args)
            if now:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        return counted


def train(folder: Path, note: Callable[..., None], until: int, keep: int | None = 2, background: bool = False) -> None:
    with CheckpointManager(folder, keep_last=keep, async_save=background) as manager:
        run = Training()
        if (newest := manager.latest_good()) is not None:
            run.load(newest)
        while run.step < until:
            loss = run.advance()
            note("loss", run.step, loss)
            manager.check()
            if run.step % SAVE_EVERY == 0:
                manager.save(run.step, run.writer(through_seam=False), expected_bytes=40_000)


def fork(ops: writer.FileOps, work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            writer.ops = ops
            work()
            code = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return pid


def was_killed(status: int) -> bool:
    """False: it ended well before the kill came. Anything else is a fault of the test itself."""
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    assert os.waitstatus_to_exitcode(status) == 0, f"the training process failed: {status}"
    return False


def kill_after(pid: int, seconds: float) -> bool:
    """False when the process came to its end before."""
    handle = os.pidfd_open(pid)
    select.select([handle], [], [], seconds)
    os.close(handle)
    os.kill(pid, signal.SIGKILL)
    return was_killed(os.waitpid(pid, 0)[1])


class Reference:
    """The undisturbed run: its losses, and the files of all its checkpoints."""

    def __init__(self, folder: Path) -> None:
        journal = folder.with_suffix(".log")
        began = time.perf_counter()
        ops = Journal(journal)
        pid = fork(ops, lambda: train(folder, ops.note, STEPS, keep=None))
        assert not was_killed(os.waitpid(pid, 0)[1])
        self.seconds = time.perf_counter() - began
        self.losses = {step: value for kind, step, value in read(journal) if kind == "loss"}
        self.files = {step_of(path): manifest.check(path).files for path in CheckpointManager(folder).list()}
        assert len(self.losses) == STEPS
        assert len(self.files) == STEPS // SAVE_EVERY

    def torn(self, folder: Path) -> list[str]:
        """Published folders that do not verify or are not bit for bit those of the undisturbed run."""
        bad = []
        for path in CheckpointManager(folder).list():
            try:
                if manifest.check(path).files != self.files[step_of(path)]:
                    bad.append(f"{path.name}: other content")
            except CheckpointError as error:
                bad.append(f"{path.name}: {error.what}")
        return bad


def read(journal: Path) -> list[tuple[str, int, str]]:
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [(kind, int(step), value) for kind, step, value in (line.split() for line in lines)]


def leftovers(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith((".tmp-", ".del-", ".old-"))]


def kill_at_random_times(root: Path, reference: Reference, kills: int, inside: int, seed: int) -> dict:
    """Goes on past `kills` until `inside` of them fell into a save or a deletion (at most three times as many)."""
    rng, window = random.Random(seed), reference.seconds
    out = {"kills": 0, "inside": 0, "inside_background": 0, "runs_completed": 0, "stale_locks": 0, "losses_compared": 0}
    faults: dict[str, list[str]] = {"lost": [], "torn": [], "different": []}
    run = 0
    while out["kills"] < kills or (out["inside"] < inside and out["kills"] < 3 * kills):
        folder, journal = root / f"run-{run}", root / f"run-{run}.log"
        folder.mkdir(exist_ok=True)
        ops, background = Journal(journal), run % 2 == 1
        pid = fork(ops, functools.partial(train, folder, ops.note, STEPS, background=background))
        os.close(ops.fd)
        killed = kill_after(pid, rng.uniform(0, window))
        window *= 1.05 if killed else 0.8  # the speed of the machine changes: keep about one run in five to its end
        out["kills"] += killed
        out["inside"] += bool(killed and leftovers(folder))
        out["inside_background"] += bool(killed and background and leftovers(folder))
        out["stale_locks"] += (folder / LOCK).exists()
        events = read(journal)
        published = {step for kind, step, _ in events if kind == "published"}
        deleting = {step for kind, step, _ in events if kind == "deleting"}
        there = {step_of(path) for path in CheckpointManager(folder).list()}
        faults["lost"] += [f"{folder.name}: {step}" for step in published - deleting - there]
        faults["torn"] += [f"{folder.name}/{bad}" for bad in reference.torn(folder)]
        if not killed:
            losses = [(step, value) for kind, step, value in events if kind == "loss"]
            out["losses_compared"] += len(losses)
            faults["different"] += [f"{folder.name}: {step}" for step, v in losses if reference.losses[step] != v]
            out["runs_completed"] += 1
            run += 1
    unfinished = [(s, v) for kind, s, v in read(root / f"run-{run}.log") if kind == "loss"]
    out["losses_compared"] += len(unfinished)
    faults["different"] += [f"run-{run}: {step}" for step, value in unfinished if reference.losses[step] != value]
    return {**out, **faults, "seconds_of_a_run": reference.seconds}


def one_save(step: int, write: writer.Write) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        with CheckpointManager(folder, keep_last=2) as manager:
            manager.begin(manager.latest_good())  # a step of this run's own may be saved again
            manager.save(step, write)

    return work


def only_start(folder: Path) -> None:
    CheckpointManager(folder).start().close()


def prepare(folder: Path, saves: list[tuple[int, writer.Write]], hide: str = "") -> None:
    folder.mkdir()
    for step, write in saves:
        one_save(step, write)(folder)
    if hide:  # as a kill between the two renames of a replacement leaves it, with the new folder half written
        newest = folder / f"checkpoint-{saves[-1][0]}"
        shutil.copytree(newest, writer.hidden(folder, "tmp", newest.name))
        newest.rename(writer.hidden(folder, hide, newest.name))


def kill_at_every_call(root: Path, reference: Reference) -> dict:
    run, at = Training(), {}
    while run.step < 6:
        run.advance()
        at[run.step] = run.writer(through_seam=True)
    two = [(2, at[2]), (4, at[4])]
    cases: dict[str, tuple] = {  # what is there before, what is done, the newest step allowed after
        "first save": ([], "", one_save(2, at[2]), {None, 2}),
        "later save, with rotation": (two, "", one_save(6, at[6]), {4, 6}),
        "the same step again": (two, "", one_save(4, at[4]), {4}),
        "start after a kill": (two, "old", only_start, {4}),
    }
    out: dict = {"points": {}, "wrong": [], "torn": [], "different": [], "left": [], "resumed": 0}
    for name, (before, hide, work, allowed) in cases.items():
        template = root / name.replace(" ", "-")
        prepare(template, before, hide)
        counted = KillAt(at=-1)
        dry = shutil.copytree(template, root / "dry", dirs_exist_ok=False)
        writer.ops = counted
        work(dry)
        writer.ops = writer.FileOps()
        shutil.rmtree(dry)
        points = [(at, False) for at in range(1, len(counted.calls) + 1)]
        points += [(at, True) for at, call in enumerate(counted.calls, 1) if call == "write"]
        hit = 0
        for at, half in points:
            folder = shutil.copytree(template, root / "trial")
            pid = fork(KillAt(at, half), functools.partial(work, folder))
            hit += was_killed(os.waitpid(pid, 0)[1])
            where = f"{name}, call {at}{' half' if half else ''}"
            judge(folder, reference, allowed, where, out)
            shutil.rmtree(folder)
        out["points"][name] = {"calls": len(counted.calls), "points": len(points), "kills": hit}
    return out


def judge(folder: Path, reference: Reference, allowed: set[int | None], where: str, out: dict) -> None:
    out["torn"] += [f"{where}: {bad}" for bad in reference.torn(folder)]
    losses: list[tuple[int, str]] = []
    with CheckpointManager(folder) as manager:
        newest = manager.latest_good()
        if (step_of(newest) if newest else None) not in allowed:
            out["wrong"].append(f"{where}: newest is {newest and newest.name}")
        out["left"] += [f"{where}: {name}" for name in leftovers(folder)]
        run = Training()
        if newest:
            run.load(newest)
        for _ in range(3):
            loss = run.advance()
            losses.append((run.step, loss))
    out["resumed"] += 1
    out["different"] += [f"{where}: loss of step {s}" for s, loss in losses if reference.losses[s] != loss]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--inside", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    Training().advance()  # the first optimiser step imports a great deal: a fork should not
    reference = Reference(args.root / "undisturbed")
    began = time.perf_counter()
    calls = kill_at_every_call(args.root, reference)
    halfway = time.perf_counter()
    kills = kill_at_random_times(args.root, reference, args.kills, args.inside, args.seed)
    seconds = {"calls": halfway - began, "random": time.perf_counter() - halfway}
    result = {"calls": calls, "random": kills, "seconds": seconds}
    (args.root / "result.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
