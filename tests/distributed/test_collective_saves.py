"""Saves that all ranks make together: they hold what training had, and all ranks agree on how each one went."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from erniekit.checkpoint.collective import CollectiveSaves
from erniekit.checkpoint.manager import CheckpointManager
from erniekit.checkpoint.shards import write_shards
from erniekit.devices import pick
from erniekit.errors import CheckpointError
from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from support.fake_sharding import random_sharding
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

SHAPES = {"a": (12, 10), "b": (7,), "c": (16, 4), "d": (9, 9), "e": (1, 40), "f": (33, 3)}


def failure(work: Callable[[], Any]) -> str:
    try:
        work()
    except CheckpointError as error:
        return str(error)
    return ""


class Run:
    """A little training state spread over the ranks, and its saves."""

    def __init__(self, output: str, async_save: bool = False, seed: int = 3, **options: Any) -> None:
        alone = not dist.is_initialized()
        self.rank, size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        self.world = World(Layout(dp=size), self.rank)
        self.sharding = random_sharding(SHAPES, size, seed)
        self.manager = CheckpointManager(Path(output), async_save=async_save)
        if self.world.is_main:
            self.manager.start()
        group = None if alone else dist.new_group(backend="gloo")
        self.saves = CollectiveSaves(self.manager, self.world, self.sharding, pick("cpu"), group, **options)
        self.fault = ""
        self.slow = 0.0
        self.after: Path | None = None  # a write comes to its end when this is there
        self.set(0)

    def set(self, step: int) -> None:
        self.step = step
        self.tensors = {n: self.sharding.local(n, self.rank, value_at(n, step)) for n in SHAPES}

    def pieces(self) -> dict[str, dict[str, torch.Tensor]]:
        held = {n: t for n, t in self.tensors.items() if self.sharding.boxes(n, self.rank)}
        return {"weights": held, "moments": {f"{n}/exp_avg": t + 1 for n, t in held.items()}, "masters": {}}

    def write(self, folder: Path, whole: Any) -> None:
        time.sleep(self.slow)
        end = time.monotonic() + 60
        while self.after is not None and not self.after.exists() and time.monotonic() < end:
            time.sleep(0.01)
        if self.fault == "disk":
            raise OSError(28, "No space left on device")
        if self.fault == "bug":
            raise KeyError("an error of ours")
        write_shards(folder, "model", whole["weights"].items())
        write_shards(folder, "optimizer", whole["moments"].items())
        assert not len(whole["masters"])

    def save(self, **how: Any) -> Path | None:
        return self.saves.save(self.step, self.pieces(), self.write, {"updates": self.step}, **how)

    def close(self) -> None:
        if self.world.is_main:
            self.manager.close()


def value_at(name: str, step: int) -> torch.Tensor:
    shape = SHAPES[name]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1000 * step


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {**load_file(folder / "model.safetensors"), **load_file(folder / "optimizer.safetensors")}


def check_stored(folder: Path, step: int) -> None:
    got = stored(folder)
    assert set(got) == {*SHAPES, *(f"{n}/exp_avg" for n in SHAPES)}
    assert all(torch.equal(got[n], value_at(n, step)) for n in SHAPES)
    assert all(torch.equal(got[f"{n}/exp_avg"], value_at(n, step) + 1) for n in SHAPES)


def save_and_go_on(output: str, async_save: bool) -> list[str | None]:
    """Saves at steps 1 and 2, changing every tensor right after each."""
    run = Run(output, async_save, seed=dist.get_world_size())
    paths = []
    for step in (1, 2):
        run.set(step)
        run.slow = 0.3 if async_save else 0.0
        paths.append(run.save())
        for tensor in run.tensors.values():
            tensor.fill_(-1.0)
    run.saves.close()
    assert run.saves.published(2)
    assert not run.saves.published(3)
    run.close()
    return [path and path.name for path in paths]


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_save_holds_what_training_had_when_it_was_asked_for(
    ranks: Ranks, tmp_path: Path, count: int, async_save: bool
) -> None:
    names = ranks.run(count, save_and_go_on, str(tmp_path), async_save)
    assert names == [[None, None] if async_save else ["checkpoint-1", "checkpoint-2"]] * count
    for step in (1, 2):
        CheckpointManager(tmp_path).verify(tmp_path / f"checkpoint-{step}", "full")
        check_stored(tmp_path / f"checkpoint-{step}", step)


def test_every_number_of_ranks_writes_the_same_bytes(ranks: Ranks, tmp_path: Path) -> None:
    for count in (1, 2, 4):
        ranks.run(count, save_and_go_on, str(tmp_path / str(count)), False)
    files = [(tmp_path / str(count) / "checkpoint-2" / "optimizer.safetensors").read_bytes() for count in (1, 2, 4)]
    assert files[0] == files[1] == files[2]


def miss_and_recover(output: str, async_save: bool) -> list[Any]:
    run = Run(output, async_save)
    told = []
    for step, fault in enumerate(["", "disk", "rank", "", "disk", "disk", "disk"], start=1):
        run.set(step)
        run.fault = fault
        if fault == "rank" and run.rank == 1:
            run.tensors = {n: t[:0] for n, t in run.tensors.items()}
        error = failure(lambda: (run.save(), run.saves.wait()))
        told.append((run.saves.misses, run.saves.published(step), error.splitlines()[0] if error else ""))
    run.close()
    return told


@pytest.mark.parametrize("async_save", [False, True])
def test_all_ranks_count_the_same_misses_and_stop_together(ranks: Ranks, tmp_path: Path, async_save: bool) -> None:
    first, *others = ranks.run(3, miss_and_recover, str(tmp_path), async_save)
    assert [(misses, there) for misses, there, _ in first] == [
        (0, True), (1, False), (2, False), (0, True), (1, False), (2, False), (3, False),
    ]  # fmt: skip
    assert [bool(error) for *_, error in first] == [False] * 6 + [True]
    assert "No space left" in first[-1][2]
    assert all(told == first for told in others)
    assert not list(tmp_path.glob(".tmp-*"))
    check_stored(tmp_path / "checkpoint-4", 4)


def notice_in_the_background(output: str) -> list[int]:
    """A save that fails after a while, with training (and its collectives) going on: when each rank learns of it."""
    run = Run(output, async_save=True)
    run.fault, run.after = "disk", Path(output) / "training goes on"
    run.set(1)
    run.save()
    noticed = []
    for step in range(3000):
        if step == 5:
            run.after.touch()
        value = torch.ones(4)
        dist.all_reduce(value)  # the main group is training's own
        run.saves.check()
        if run.saves.misses and not noticed:
            noticed.append(step)
            break
        time.sleep(0.01)
    run.fault = ""
    run.set(2)
    run.save()
    run.saves.close()
    run.close()
    return noticed


def test_a_background_failure_is_noticed_by_all_ranks_at_the_same_step(ranks: Ranks, tmp_path: Path) -> None:
    first, *others = ranks.run(3, notice_in_the_background, str(tmp_path))
    assert len(first) == 1
    assert first[0] >= 5, "training went on meanwhile"
    assert all(noticed == first for noticed in others)
    check_stored(tmp_path / "checkpoint-2", 2)


def last_save_fails(output: str, fault: str) -> tuple[str, str]:
    run = Run(output)
    run.fault = fault
    run.set(1)
    try:
        run.save(final=True)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        run.close()
    return "", ""


def test_a_final_save_that_fails_and_an_error_of_ours_raise_everywhere(ranks: Ranks, tmp_path: Path) -> None:
    told = ranks.run(2, last_save_fails, str(tmp_path / "a"), "disk")
    assert [kind for kind, _ in told] == ["CheckpointError"] * 2
    (own, _), (kind, text) = ranks.run(2, last_save_fails, str(tmp_path / "b"), "bug")
    assert (own, kind) == ("KeyError", "CheckpointError")
    assert "an error of ours" in text


def test_saves_of_one_process_need_no_group(tmp_path: Path) -> None:
    run = Run(str(tmp_path), async_save=True)
    for step in (1, 2):
        run.set(step)
        assert run.save() is None
        run.tensors["a"].zero_()
    run.saves.wait()
    assert run.save(final=True) == tmp_path / "checkpoint-2"
    run.close()
    check_stored(tmp_path / "checkpoint-1", 1)


def wait_for_a_slow_writer(output: str, async_save: bool) -> list[int]:
    """Two saves; the first takes longer than the ranks that wait for it wait for a silent writer."""
    run = Run(output, async_save, timeout=4.0)
    for step in (1, 2):
        run.set(step)
        run.slow = 6.0 if step == 1 and run.rank == 0 else 0.0
        run.save()
        run.saves.wait()
    run.close()
    return [step for step in (1, 2) if run.saves.published(step)]


@pytest.mark.parametrize("async_save", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_save_longer_than_the_time_out_breaks_neither_itself_nor_the_next(
    ranks: Ranks, tmp_path: Path, async_save: bool
) -> None:
    assert ranks.run(3, wait_for_a_slow_writer, str(tmp_path), async_save) == [[1, 2]] * 3
    for step in (1, 2):
        check_stored(tmp_path / f"checkpoint-{step}", step)


def wait_for_a_stopped_writer(output: str) -> tuple[str, float]:
    """The writer's process stands still in the middle of a save, which closes no connection. What the rank that waits
    for it learns, and after how many seconds."""
    run = Run(output, timeout=3.0)  # the ranks that ask each other before it may stand still for a moment, too
    run.set(1)
    noticed = Path(output) / "noticed"

    def stand_still(folder: Path, whole: Any) -> None:
        waits = f"for k in $(seq 300); do [ -e '{noticed}' ] && break; sleep 0.2; done"
        with subprocess.Popen(["sh", "-c", f"{waits}; kill -CONT {os.getpid()}"]):
            os.kill(os.getpid(), signal.SIGSTOP)

    began, learnt = time.monotonic(), []
    serve = run.saves._serve

    def served(exchange: Any) -> dict[str, Any]:
        outcome = serve(exchange)
        learnt.append((outcome.get("what", ""), time.monotonic() - began))
        noticed.touch()
        return outcome

    run.saves._serve = served  # type: ignore[method-assign]
    run.saves.save(1, run.pieces(), stand_still)
    run.close()
    return learnt[0] if learnt else ("", 0.0)


def test_a_writer_that_stands_still_is_noticed_within_the_time_out(ranks: Ranks, tmp_path: Path) -> None:
    _, (told, seconds) = ranks.run(2, wait_for_a_stopped_writer, str(tmp_path))
    assert "rank 0 did not answer within 3 s" in told
    assert seconds < 30, "well before it would have gone on by itself, after a minute"
