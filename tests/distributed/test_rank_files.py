"""States that each rank writes itself: no tensor travels, any layout reads what it needs, one rank's fault is told."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from erniekit import heartbeat
from erniekit.checkpoint import gather, rank_files, writer
from erniekit.checkpoint.collective import CollectiveSaves
from erniekit.checkpoint.compress import StoredState
from erniekit.checkpoint.manager import CheckpointManager
from erniekit.checkpoint.shards import write_shards
from erniekit.checkpoint.slices import TensorFiles
from erniekit.devices import pick
from erniekit.errors import CheckpointError
from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from support.clock import PATIENCE_S
from support.fake_sharding import FakeSharding, Held, random_sharding
from support.memory import memory
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

SHAPES = {"a": (12, 10), "b": (7,), "c": (16, 4), "d": (9, 9), "e": (1, 40), "f": (33, 3)}


def value_of(name: str) -> torch.Tensor:
    shape = SHAPES[name]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 1000 * ord(name)


def saves_of(output: str, sharding: Any) -> CollectiveSaves:
    rank, size = dist.get_rank(), dist.get_world_size()
    manager, world = CheckpointManager(Path(output)), World(Layout(dp=size), rank)
    if world.is_main:
        manager.start()
    return CollectiveSaves(manager, world, sharding, pick("cpu"), dist.new_group(backend="gloo"))


class FullForSecondFiles(writer.FileOps):
    def create(self, path: Path) -> int:
        if path.name.endswith("-part-2.safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(path)


def save(output: str, seed: int, fault: str = "") -> tuple[str, int]:
    """What went wrong, and how many tensors this rank was asked for."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sharding = random_sharding(SHAPES, size, seed)
    saves, sent, plain = saves_of(output, sharding), [0], gather.Exchange._send_part

    def counted(self: Any, name: str) -> None:
        sent[0] += 1
        plain(self, name)

    def write(folder: Path, whole: Any) -> None:
        (folder / "model.txt").write_text("weights")
        if not whole["moments"].write_parts(folder, "optimizer"):
            write_shards(folder, "optimizer", whole["moments"].items())

    own = gather.Exchange._write_own

    def faulty(self: Any, told: Any) -> dict[str, Any]:
        if fault == "other disk" and rank == 1:
            told = {**told, "folder": "/nowhere/at/all"}
        if fault == "full disk" and rank == 1:
            return {"what": "rank 1: No space left on device"}
        return own(self, told)

    held = {f"{n}/exp_avg": sharding.local(n, rank, value_of(n)) for n in SHAPES if sharding.boxes(n, rank)}
    gather.Exchange._send_part, gather.Exchange._write_own = counted, faulty  # type: ignore[method-assign]
    try:
        saves.save(1, {"moments": held}, write, final=True)
        return "", sent[0]
    except CheckpointError as error:
        return str(error), sent[0]
    finally:
        gather.Exchange._send_part, gather.Exchange._write_own = plain, own  # type: ignore[method-assign]
        if rank == 0:
            saves.manager.close()


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_write_their_own_and_any_layout_reads_just_what_it_needs(
    count: int, ranks: Ranks, tmp_path: Path
) -> None:
    told = ranks.run(count, save, str(tmp_path), 5)
    assert told == [("", 0)] * count, "no tensor travels"
    folder = tmp_path / "checkpoint-1"
    names = sorted(p.name for p in folder.glob("optimizer*"))
    assert names == [f"optimizer-rank-{k:05d}-of-{count:05d}.safetensors" for k in range(count)]
    CheckpointManager(tmp_path).verify(folder, "full")
    whole = TensorFiles.of_stem(folder, "optimizer")
    assert all(torch.equal(whole.read(f"{n}/exp_avg"), value_of(n)) for n in SHAPES)
    other = random_sharding(SHAPES, 3, 8)
    for rank in range(3):
        stored, held = StoredState(folder, "optimizer", other, rank), 0
        for name in SHAPES:
            if boxes := other.boxes(name, rank):
                part, want = stored[f"{name}/exp_avg"], other.local(name, rank, value_of(name))
                for box in boxes:
                    assert torch.equal(part[box.local_slices], want[box.local_slices])
                    held += 4 * part[box.local_slices].numel()
        assert stored.files.bytes_read == held


def save_in_two(output: str, seed: int) -> tuple[str, int]:
    rank_files.TWO_FROM = 1  # this process is of this call's ranks only
    try:
        return save(output, seed)
    finally:
        rank_files.TWO_FROM = 128 << 20


def test_a_rank_with_much_writes_two_files_at_once_and_they_are_read_as_one(ranks: Ranks, tmp_path: Path) -> None:
    told = ranks.run(2, save_in_two, str(tmp_path), 5)
    assert told == [("", 0)] * 2
    folder = tmp_path / "checkpoint-1"
    sizes = {p.name: p.stat().st_size for p in folder.glob("optimizer*")}
    first = [f"optimizer-rank-{k:05d}-of-00002" for k in range(2)]
    assert sorted(sizes) == sorted(f"{name}{more}.safetensors" for name in first for more in ("", "-part-2"))
    CheckpointManager(tmp_path).verify(folder, "full")
    whole = TensorFiles.of_stem(folder, "optimizer")
    assert all(torch.equal(whole.read(f"{n}/exp_avg"), value_of(n)) for n in SHAPES)


def save_in_two_on_a_full_disk(output: str, seed: int) -> tuple[str, int]:
    usual, writer.ops = writer.ops, FullForSecondFiles() if dist.get_rank() == 1 else writer.ops
    try:
        return save_in_two(output, seed)
    finally:
        writer.ops = usual


def test_a_disk_that_is_full_for_the_second_file_of_a_rank_fails_the_save_with_what_to_do(
    ranks: Ranks, tmp_path: Path
) -> None:
    for told, _ in ranks.run(2, save_in_two_on_a_full_disk, str(tmp_path), 5):
        what, where, fix = told.splitlines()
        assert what.startswith("error: rank 1: checkpoint-1 was not written: No space left on device")
        assert where.endswith(str(tmp_path))
        assert "free space" in fix
    assert not list(tmp_path.glob("*checkpoint-*"))


@pytest.mark.parametrize("damage", ["missing", "cut short", "one bit"])
def test_a_second_file_that_is_damaged_is_found_before_anything_is_read(
    ranks: Ranks, tmp_path: Path, damage: str
) -> None:
    ranks.run(2, save_in_two, str(tmp_path), 5)
    folder = tmp_path / "checkpoint-1"
    path = folder / "optimizer-rank-00001-of-00002-part-2.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "cut short" else data)
    with pytest.raises(CheckpointError, match="part-2"):
        CheckpointManager(tmp_path).verify(folder, "full")


def test_a_rank_that_does_not_see_the_folder_sends_its_part_as_before(ranks: Ranks, tmp_path: Path) -> None:
    told = ranks.run(2, save, str(tmp_path), 5, "other disk")
    assert [what for what, _ in told] == ["", ""]
    assert told[1][1] > 0
    folder = tmp_path / "checkpoint-1"
    assert [p.name for p in folder.glob("optimizer*")] == ["optimizer.safetensors"]
    whole = TensorFiles.of_stem(folder, "optimizer")
    assert all(torch.equal(whole.read(f"{n}/exp_avg"), value_of(n)) for n in SHAPES)


def signs_of_life(output: str, wanted: int) -> int:
    """How many this rank gave after it had written, in a save for which rank 1 takes until all others gave `wanted`."""
    sharding, rank, size = random_sharding(SHAPES, dist.get_world_size(), 5), dist.get_rank(), dist.get_world_size()
    own, places, is_done = gather.Exchange._write_own, [Path(output) / f"signs-{r}" for r in range(size)], []
    places[rank].touch()
    dist.barrier()

    def slowly(self: Any, told: Any) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_S
        while rank == 1 and time.monotonic() < end:  # as a disk that takes piece after piece
            if all(place.stat().st_size >= wanted for place in places[:1] + places[2:]):
                break
            heartbeat.beat()
            time.sleep(0.05)
        outcome = own(self, told)
        is_done.append(True)
        return outcome

    def sign() -> None:
        if is_done:
            with places[rank].open("ab") as file:
                file.write(b".")

    def write(folder: Path, whole: Any) -> None:
        assert whole["moments"].write_parts(folder, "optimizer")

    saves = saves_of(output, sharding)
    held = {f"{n}/exp_avg": sharding.local(n, rank, value_of(n)) for n in SHAPES if sharding.boxes(n, rank)}
    gather.Exchange._write_own = slowly  # type: ignore[method-assign]
    try:
        with heartbeat.listening(sign):
            saves.save(1, {"moments": held}, write, final=True)
    finally:
        gather.Exchange._write_own = own  # type: ignore[method-assign]
        if rank == 0:
            saves.manager.close()
    return places[rank].stat().st_size


def test_ranks_that_are_done_show_signs_of_life_while_another_writes(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(4, signs_of_life, str(tmp_path), 3)
    assert min(found[:1] + found[2:]) >= 3, found


def test_a_rank_that_cannot_write_fails_the_save_on_all_and_leaves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    told = ranks.run(2, save, str(tmp_path), 5, "full disk")
    assert all("rank 1: No space left" in what for what, _ in told)
    assert not list(tmp_path.glob("*checkpoint-*"))


class Rows(FakeSharding):
    """Rows dealt evenly: nobody's are anybody else's, so that who holds what takes no time to find."""

    def holders(self, name: str) -> list[tuple[int, Any]]:
        return [(rank, self.boxes(name, rank)) for rank in range(len(self.held[name]))]


def measured(output: str, rows: int, tensors: int) -> tuple[float, float, int, int]:
    """Seconds that writing and hashing this rank's share take, and the save; how far memory grew; bytes of a share."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shapes = {f"w{k}": (rows, 1024) for k in range(tensors)}
    cut = [Held(((rows * r // size, rows * (r + 1) // size),)) for r in range(size)]
    sharding = Rows(shapes, {name: list(cut) for name in shapes})
    saves = saves_of(output, sharding)
    held = {f"{n}/exp_avg": torch.rand(rows // size, 1024) for n in shapes}
    share = sum(t.numel() * 4 for t in held.values())
    times, grown = {"plain": [], "save": []}, 0
    for attempt in range(3):
        dist.barrier()
        began, path = time.perf_counter(), Path(output) / f".plain-{rank}"
        with path.open("wb", buffering=0) as file:
            for tensor in held.values():
                file.write(tensor.view(-1).view(torch.uint8).numpy().data)
            os.fsync(file.fileno())
        wrote = time.perf_counter() - began
        path.unlink()
        dist.barrier()
        began = time.perf_counter()
        for tensor in held.values():
            hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().data)
        # A save hashes beside its writing, which takes two cores a rank; with fewer, one after the other.
        hashed, apart = time.perf_counter() - began, (os.cpu_count() or 1) < 2 * size
        times["plain"].append(wrote + hashed if apart else max(wrote, hashed))
        Path("/proc/self/clear_refs").write_text("5")  # the most that is held is counted anew
        dist.barrier()
        before, began = memory("VmRSS"), time.perf_counter()
        saves.save(attempt, {"moments": held}, lambda folder, whole: _parts(folder, whole), final=True)
        times["save"].append(time.perf_counter() - began)
        grown = max(grown, memory() - before)
    if rank == 0:
        saves.manager.close()
    return min(times["plain"]), min(times["save"]), grown, share


def _parts(folder: Path, whole: Any) -> None:
    assert whole["moments"].write_parts(folder, "optimizer")


def test_no_ranks_memory_grows_by_more_than_its_share(ranks: Ranks, tmp_path: Path) -> None:
    for _, _, grown, share in ranks.run(2, measured, str(tmp_path), 8192, 4):
        assert share == 64 << 20
        assert grown < share


@pytest.mark.full
def test_two_gib_of_state_are_saved_by_four_ranks_in_the_time_of_the_largest_ranks_write(
    ranks: Ranks, tmp_path: Path
) -> None:
    told = ranks.run(4, measured, str(tmp_path), 65536, 8)
    plain, saved = max(t[0] for t in told), max(t[1] for t in told)
    assert all(grown < share == 512 << 20 for _, _, grown, share in told)
    assert saved <= 1.2 * plain, f"{saved:.2f} s for a save, {plain:.2f} s for a plain write"
