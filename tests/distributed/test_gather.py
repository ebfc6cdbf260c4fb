"""Whole tensors from ranks' parts, bit for bit; a rank that fails never hangs the others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from erniekit.checkpoint import parts
from erniekit.checkpoint.gather import Exchange, Local
from erniekit.checkpoint.host_copies import HostCopies
from erniekit.checkpoint.wire import TIMEOUT, Wire
from erniekit.devices import pick
from erniekit.errors import CheckpointError
from support.fake_sharding import FakeSharding, Held, random_sharding
from support.ranks import Ranks

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
    sent, real = [0], Wire.send

    def send(self: Wire, rank: int, data: torch.Tensor) -> None:
        sent[0] += data.nbytes
        real(self, rank, data)

    Wire.send = send  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        Wire.send = real  # type: ignore[method-assign]


def failure(work: Callable[[], Any]) -> str:
    try:
        work()
    except CheckpointError as error:
        return str(error)
    return ""


# --- gathering ---


def gather_tensors(
    names: Sequence[str],
    local: Local,
    sharding: FakeSharding,
    rank: int,
    group: dist.ProcessGroup | None,
    writer: int = 0,
    timeout: float = TIMEOUT,
) -> Iterator[tuple[str, torch.Tensor]]:
    """All ranks iterate it, with the same names: each whole tensor on the writer; nothing elsewhere, but it serves.

    `name/anything` is cut as parameter `name` is. Leaving the loop early ends it on every rank, with an error there.
    """
    exchange = Exchange(names, local, sharding, rank, group, writer, timeout)
    if rank != writer:
        exchange.serve()
        return
    finished = False
    try:
        with exchange.at_work():
            for name in names:
                yield name, exchange.fetch(name)
        finished = True
    finally:
        exchange.end({} if finished else {"what": f"rank {writer} stopped before all tensors were gathered"})


def gather_random(seeds: list[int], chunk: int) -> list[int]:
    """Bytes this rank sent, for each seed; the writer compares every bit."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo")
    names = [*SHAPES, "a/exp_avg", "f/exp_avg"]
    usual, parts.CHUNK = parts.CHUNK, chunk
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
    parts.CHUNK = usual
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
    assert time.monotonic() - started < 60  # of the half hour that a silent rank is waited for


def gather_with_a_silent_rank() -> tuple[str, float]:
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    sharding = FakeSharding({"a": (12, 10)}, {"a": [None, Held(((0, 12),)), None]})
    started = time.monotonic()
    error = ""
    if rank != 1:
        error = failure(lambda: list(gather_tensors(["a"], whole_tensor, sharding, rank, group, timeout=1.0)))
    took = time.monotonic() - started
    dist.barrier()  # silent, and there until the others have noticed
    return error, took


def test_a_silent_rank_is_named_after_the_time_out(ranks: Ranks) -> None:
    (error, seconds), _, (told, _) = ranks.run(3, gather_with_a_silent_rank)
    assert "rank 1 did not answer within 1 s" in error
    assert seconds < 30
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
    out = [process.communicate(timeout=120)[0] for process in started]
    assert started[1].returncode == -signal.SIGKILL
    writer, other = json.loads(out[0].splitlines()[-1]), json.loads(out[2].splitlines()[-1])
    assert "rank 1 is gone" in writer[0]
    assert "rank 0 stopped" in other[0], "the writer told the rank that was left"
    assert max(writer[1], other[1]) < 60  # of the half hour that a silent rank is waited for


def test_host_copies_reuse_their_memory() -> None:
    copies, tensor = HostCopies(pick("cpu")), torch.arange(6.0)
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
