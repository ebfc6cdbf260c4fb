"""Whole tensors from ranks' parts, bit for bit; a rank that fails never hangs the others; saves all ranks agree on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from erniekit.checkpoint import gather
from erniekit.checkpoint.collective import CollectiveSaves
from erniekit.checkpoint.gather import Exchange, HostCopies, gather_tensors
from erniekit.checkpoint.manager import CheckpointManager
from erniekit.checkpoint.shards import write_shards
from erniekit.errors import CheckpointError
from erniekit.parallel.mesh import Layout, World
from fake_sharding import FakeSharding, Held, random_sharding
from ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

SHAPES = {"a": (12, 10), "b": (7,), "c": (16, 4), "d": (9, 9), "e": (1, 40), "f": (33, 3)}
DTYPES = {"a": torch.bfloat16, "b": torch.float32, "c": torch.int8, "d": torch.float16, "e": torch.float64}


def whole_tensor(name: str) -> torch.Tensor:
    """Every bit pattern of its dtype can occur, NaNs too."""
    param = name.partition("/")[0]
    shape, dtype = SHAPES[param], DTYPES.get(param, torch.float32)
    draw = torch.Generator().manual_seed(len(name) * 100 + ord(name[0]))
    size = torch.empty(shape, dtype=dtype).nbytes
    return torch.randint(0, 256, (size,), generator=draw, dtype=torch.uint8).view(dtype).reshape(shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@contextlib.contextmanager
def counting_bytes() -> Iterator[list[int]]:
    sent, real = [0], gather.Wire.send

    def send(self: gather.Wire, rank: int, data: torch.Tensor) -> None:
        sent[0] += data.nbytes
        real(self, rank, data)

    gather.Wire.send = send  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        gather.Wire.send = real  # type: ignore[method-assign]


def failure(work: Callable[[], Any]) -> str:
    try:
        work()
    except CheckpointError as error:
        return str(error)
    return ""


# --- gathering ---


def gather_random(seeds: list[int], chunk: int) -> list[int]:
    """Bytes this rank sent, for each seed; the writer compares every bit."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo")
    names = [*SHAPES, "a/exp_avg", "f/exp_avg"]
    usual, gather.CHUNK = gather.CHUNK, chunk
    sent = []
    for seed in seeds:
        sharding, writer = random_sharding(SHAPES, world, seed), seed % world

        def local(name: str, sharding: FakeSharding = sharding) -> torch.Tensor:
            return sharding.local(name.partition("/")[0], rank, whole_tensor(name))

        with counting_bytes() as count:
            got = list(gather_tensors(names, local, sharding, rank, group, writer))
        sent.append(count[0])
        assert [name for name, _ in got] == (names if rank == writer else [])
        assert all(same_bits(tensor, whole_tensor(name)) for name, tensor in got)
        assert all(tensor.device.type == "cpu" for _, tensor in got)
    gather.CHUNK = usual
    return sent


@pytest.mark.parametrize(("count", "chunk"), [(2, 50), (4, 32 << 20), (1, 50)])
def test_every_tensor_arrives_bit_for_bit_whatever_the_cut(ranks: Ranks, count: int, chunk: int) -> None:
    ranks.run(count, gather_random, list(range(8)), chunk)


def gather_replicated() -> int:
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    sharding = FakeSharding({"a": (12, 10)}, {"a": [None, Held(((0, 12),)), Held(((0, 12),))]})
    with counting_bytes() as count:
        got = list(gather_tensors(["a"], lambda name: whole_tensor(name), sharding, rank, group))
    assert rank != 0 or same_bits(got[0][1], whole_tensor("a"))
    return count[0]


def test_a_replicated_tensor_is_sent_once(ranks: Ranks) -> None:
    asked, sent, idle = ranks.run(3, gather_replicated)
    assert idle == 0
    assert sent == 12 * 10 * 2 + 16, "bf16, and two numbers before it"
    assert asked < 100, "words, no tensors"


def test_what_the_writer_holds_whole_is_not_copied() -> None:
    sharding = FakeSharding(SHAPES, {name: [Held(((0, shape[0]),))] for name, shape in SHAPES.items()})
    tensors = {name: whole_tensor(name) for name in SHAPES}
    got = dict(gather_tensors(list(SHAPES), tensors.get, sharding, 0, None))
    assert all(got[name].data_ptr() == tensors[name].data_ptr() for name in SHAPES)


def test_a_part_of_a_live_tensor_is_never_written_into() -> None:
    """The writer holds the whole tensor, but two boxes of it are asked for: what comes out is its own memory."""
    sharding = FakeSharding({"a": (12, 10)}, {"a": [Held(((0, 5), (5, 12)))]})
    live = whole_tensor("a")
    ((_, got),) = gather_tensors(["a"], lambda _: live, sharding, 0, None)
    assert same_bits(got, live)
    assert got.data_ptr() != live.data_ptr()


def gather_with_a_fault(fault: str) -> list[str]:
    """Each rank's error; then a sound gathering over the same group, to show that it is still in step."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo")
    shares = {n: [(k * s[0] // world, (k + 1) * s[0] // world) for k in range(world)] for n, s in SHAPES.items()}
    sharding = FakeSharding(SHAPES, {n: [Held((rows,)) for rows in share] for n, share in shares.items()})

    def sound(name: str) -> torch.Tensor:
        return sharding.local(name, rank, whole_tensor(name))

    def local(name: str) -> torch.Tensor | None:
        if name != "c" or rank != 1 or fault == "stops early":
            return sound(name)
        if fault == "missing":
            return None
        if fault == "shape":
            return sound(name)[:1]
        if fault == "dtype":
            return sound(name).to(torch.int32)
        raise ValueError("out of luck")

    def run() -> None:
        for name, _ in gather_tensors(list(SHAPES), local, sharding, rank, group):
            if fault == "stops early" and name == "b":
                raise CheckpointError("disk full")

    error = failure(run)
    after = dict(gather_tensors(list(SHAPES), sound, sharding, rank, group))
    assert all(same_bits(t, whole_tensor(n)) for n, t in after.items())
    return [error]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raises", "rank 1: ValueError: out of luck"),
        ("missing", "rank 1: has nothing of c"),
        ("shape", "rank 1: holds c as (1, 4)"),
        ("dtype", "c is torch.int8 on one rank and torch.int32 on rank 1"),
        ("stops early", "disk full"),
    ],
)
def test_a_rank_that_cannot_send_ends_it_for_all_and_the_next_one_works(ranks: Ranks, fault: str, words: str) -> None:
    started = time.monotonic()
    (writer,), *others = ranks.run(3, gather_with_a_fault, fault)
    assert words in writer
    assert all("rank 0 stopped before all tensors were gathered" in error for (error,) in others)
    assert time.monotonic() - started < 30


def gather_with_a_silent_rank() -> tuple[str, float]:
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    sharding = FakeSharding({"a": (12, 10)}, {"a": [None, Held(((0, 12),)), None]})
    started = time.monotonic()
    if rank == 1:
        time.sleep(2.0)
        return "", 0.0
    error = failure(lambda: list(gather_tensors(["a"], whole_tensor, sharding, rank, group, timeout=1.0)))
    return error, time.monotonic() - started


def test_a_silent_rank_is_named_after_the_time_out(ranks: Ranks) -> None:
    (error, seconds), _, (told, _) = ranks.run(3, gather_with_a_silent_rank)
    assert "rank 1 did not answer within 1 s" in error
    assert seconds < 10
    assert told


# --- a process that dies: processes of their own ---


def die_while_sending(rank: int, store: str) -> None:
    """Rank 1 of 3 is killed after its first tensor. The others print their error and how long it took."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    group = dist.new_group(backend="gloo")
    third = [Held(((4 * k, 4 * k + 4),)) for k in range(3)]
    sharding = FakeSharding({n: (12, 10) for n in "ab"}, {n: third for n in "ab"})

    def local(name: str) -> torch.Tensor:
        if rank == 1 and name == "b":
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(4, 10)

    started = time.monotonic()
    error = failure(lambda: list(gather_tensors(["a", "b"], local, sharding, rank, group)))
    print(json.dumps([error, time.monotonic() - started]), flush=True)
    os._exit(0)


def test_a_killed_rank_is_noticed_at_once(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    commands = [[sys.executable, __file__, str(rank), str(tmp_path / "store")] for rank in range(3)]
    started = [
        subprocess.Popen(c, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for c in commands
    ]
    out = [process.communicate(timeout=60)[0] for process in started]
    assert started[1].returncode == -signal.SIGKILL
    writer, other = json.loads(out[0].splitlines()[-1]), json.loads(out[2].splitlines()[-1])
    assert "rank 1 is gone" in writer[0]
    assert "rank 0 stopped" in other[0], "the writer told the rank that was left"
    assert max(writer[1], other[1]) < 15


# --- saves of all ranks ---


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
        self.saves = CollectiveSaves(self.manager, self.world, self.sharding, group, **options)
        self.fault = ""
        self.slow = 0.0
        self.set(0)

    def set(self, step: int) -> None:
        self.step = step
        self.tensors = {n: self.sharding.local(n, self.rank, value_at(n, step)) for n in SHAPES}

    def pieces(self) -> dict[str, dict[str, torch.Tensor]]:
        held = {n: t for n, t in self.tensors.items() if self.sharding.boxes(n, self.rank)}
        return {"weights": held, "moments": {f"{n}/exp_avg": t + 1 for n, t in held.items()}, "masters": {}}

    def write(self, folder: Path, whole: Any) -> None:
        time.sleep(self.slow)
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
    run.slow, run.fault = 0.2 * (run.rank + 1), "disk"
    run.set(1)
    run.save()
    noticed = []
    for step in range(200):
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
    assert first[0] > 2, "training went on meanwhile"
    assert all(noticed == first for noticed in others)
    check_stored(tmp_path / "checkpoint-2", 2)


def time_saves(output: str, async_save: bool, megabytes: int) -> float:
    """Seconds training waited for the quickest of three saves; the first one also makes the buffers, once a run."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = megabytes * 2**20 // 8 // 16384  # of 8 tensors, 4096 wide
    held = [Held(((rows * r, rows * (r + 1)),)) for r in range(size)]
    sharding = FakeSharding({f"w{k}": (rows * size, 4096) for k in range(8)}, {f"w{k}": held for k in range(8)})
    weights = {name: torch.ones(rows, 4096) for name in sharding.names()}
    manager = CheckpointManager(Path(output), async_save=async_save)
    if rank == 0:
        manager.start()
    saves = CollectiveSaves(manager, World(Layout(dp=size), rank), sharding, dist.new_group(backend="gloo"))

    def write(folder: Path, whole: Any) -> None:
        write_shards(folder, "model", whole["weights"].items())

    seconds = []
    for step in range(1, 5):
        dist.barrier()
        started = time.perf_counter()
        saves.save(step, {"weights": weights}, write)
        seconds.append(time.perf_counter() - started)
        saves.wait()
    if rank == 0:
        manager.close()
    return min(seconds[1:])


def test_a_background_save_stalls_training_under_5_percent_of_a_blocking_one(ranks: Ranks, tmp_path: Path) -> None:
    blocking = max(ranks.run(2, time_saves, str(tmp_path / "a"), False, 96))
    stall = max(ranks.run(2, time_saves, str(tmp_path / "b"), True, 96))
    assert stall < 0.05 * blocking, f"{stall * 1000:.0f} ms of {blocking * 1000:.0f}"


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


def test_host_copies_reuse_their_memory() -> None:
    copies, tensor = HostCopies(), torch.arange(6.0)
    one = copies.take({"a": tensor})["a"]
    tensor += 1
    assert one.tolist() == [0, 1, 2, 3, 4, 5]
    two = copies.take({"a": tensor})["a"]
    assert two.data_ptr() == one.data_ptr()
    assert copies.take({"a": tensor[:3]})["a"].tolist() == [1, 2, 3]


def test_an_exchange_is_asked_in_any_order_and_as_often_as_liked() -> None:
    sharding = FakeSharding(SHAPES, {name: [Held(((0, shape[0]),))] for name, shape in SHAPES.items()})
    exchange = Exchange(list(SHAPES), whole_tensor, sharding, 0, None)
    assert same_bits(exchange.fetch("f"), whole_tensor("f"))
    assert same_bits(exchange.fetch("a"), exchange.fetch("a"))
    exchange.end({})


if __name__ == "__main__":
    die_while_sending(int(sys.argv[1]), sys.argv[2])
