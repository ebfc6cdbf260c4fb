"""A model's files that all ranks write together: what is in them, who writes, and one rank's fault reaches all."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from erniekit.checkpoint import assembly, gather, writer
from erniekit.checkpoint.assembly import ModelFiles
from erniekit.checkpoint.collective import CollectiveSaves
from erniekit.checkpoint.manager import CheckpointManager
from erniekit.checkpoint.shards import write_shards
from erniekit.devices import pick
from erniekit.errors import CheckpointError
from erniekit.models.names import Entry
from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from support.fake_sharding import random_sharding
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

SHAPES = {"a": (12, 10), "b": (7,), "c": (16, 4), "d": (9, 9), "e": (1, 40), "f": (33, 3), "g": (64, 8)}
HALF = {"a", "d", "g"}  # in 16 bit


def value_of(name: str) -> torch.Tensor:
    shape = SHAPES[name]
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 1000 * ord(name)
    return numbers.bfloat16() if name in HALF else numbers


def entries() -> list[Entry]:
    """Tensors stored as they are, turned, in two pieces, once more under another name, and with a piece that has no
    element."""
    plain = [
        Entry(n, (f"model.{n}", f"model.{n}.none"), lambda ts: ts[0], lambda t: [t, t[:0]]) for n in ("b", "d", "f")
    ]
    turned = Entry("a", ("model.a",), lambda ts: ts[0].t(), lambda t: [t.t()])
    cut = [Entry(n, (f"{n}.0", f"{n}.1"), torch.cat, lambda t: list(t.chunk(2))) for n in ("c", "g")]
    return [
        turned,
        *cut,
        *plain,
        Entry("e", ("e",), lambda ts: ts[0], lambda t: [t]),
        Entry("b", ("copy",), *plain_b()),
    ]


def plain_b() -> tuple[Any, Any, str]:
    return (lambda ts: ts[0]), (lambda t: [t]), "model.b"


def wanted() -> dict[str, torch.Tensor]:
    return {name: t for e in entries() for name, t in zip(e.theirs, e.write(value_of(e.ours)))}


def check(name: str, tensor: torch.Tensor) -> None:
    if not bool(tensor.isfinite().all()):
        raise CheckpointError(f"{name} holds values that are not numbers")


def failing_check(name: str, tensor: torch.Tensor) -> None:
    raise RuntimeError("no memory for a check")


class FailingTensor(torch.Tensor):
    """Of a device that has failed: nothing can be copied from it."""

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("an illegal memory access was encountered")


def save(
    output: str, seed: int, fault: str = "", limit: int = 1500, one_file: bool = False
) -> tuple[str, list[str], int]:
    """What went wrong, the files this rank wrote, and how many tensors rank 0 asked this rank for."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sharding = random_sharding(SHAPES, size, seed)
    manager, world = CheckpointManager(Path(output)), World(Layout(dp=size), rank)
    if world.is_main:
        manager.start()
    saves = CollectiveSaves(manager, world, sharding, pick("cpu"), dist.new_group(backend="gloo"), timeout=60)
    wrote, asked = [], [0]
    stream, answer, done = assembly.write_stream, gather.Exchange._send_part, gather.Exchange._done

    def counted(self: Any, name: str) -> None:
        asked[0] += 1
        answer(self, name)

    def faulty(self: Any, word: int, order: Any) -> dict[str, Any]:
        return done(
            self, word, {**order, "folder": "/nowhere/at/all"} if fault == "other disk" and rank == 1 else order
        )

    def streamed(path: Path, *more: Any) -> Any:
        wrote.append(path.name)
        if fault == "full disk" and rank == 1:
            writer.ops.write = lambda fd, data: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device"))
        return stream(path, *more)

    def write(folder: Path, whole: Any) -> None:
        if whole["weights"].write_files(folder, "model") is None:
            raise CheckpointError("not together")

    held = {n: sharding.local(n, rank, value_of(n)) for n in SHAPES if sharding.boxes(n, rank)}
    if fault == "not a number" and rank == 1:
        held = {n: torch.full_like(t, float("nan")) for n, t in held.items()}
    if fault == "missing" and rank == 1:
        held = {n: t for n, t in held.items() if n != "g"}
    own_part = gather.Exchange._part
    if fault == "failing device" and rank == 1:
        gather.Exchange._part = lambda self, name: own_part(self, name).as_subclass(FailingTensor)  # type: ignore
    assembly.write_stream, gather.Exchange._send_part, gather.Exchange._done = streamed, counted, faulty  # type: ignore
    stretches = writer.write_stretches
    writer.write_stretches = lambda path, mine: wrote.append(path.name) or stretches(path, mine)  # type: ignore
    try:
        checked = failing_check if fault == "failing check" and rank == 1 else check
        model = ModelFiles(entries(), checked, limit=limit, one_file=one_file)
        saves.save(1, {"weights": held}, write, final=True, model=model)
        return "", wrote, asked[0]
    except CheckpointError as error:
        return error.what, wrote, asked[0]
    finally:
        assembly.write_stream, gather.Exchange._send_part, gather.Exchange._done = stream, answer, done  # type: ignore
        gather.Exchange._part, writer.write_stretches = own_part, stretches  # type: ignore
        writer.ops.__dict__.pop("write", None)
        if rank == 0:
            saves.manager.close()


@pytest.mark.parametrize(("count", "seed"), [(2, 5), (4, 5), (4, 11)])
def test_each_file_is_written_by_one_rank_and_all_together_are_the_model(
    count: int, seed: int, ranks: Ranks, tmp_path: Path
) -> None:
    results = ranks.run(count, save, str(tmp_path), seed)
    assert [what for what, _, _ in results] == [""] * count
    assert not any(asked for _, _, asked in results), "no tensor was sent to rank 0 to be written there"
    assert sum(bool(wrote) for _, wrote, _ in results) > 1, "more than one rank wrote"
    folder = tmp_path / "checkpoint-1"
    CheckpointManager(tmp_path).verify(folder, "full")
    files = sorted(p.name for p in folder.glob("*.safetensors"))
    assert files == sorted(name for _, wrote, _ in results for name in wrote)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    want = wanted()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in want.values())
    assert index["weight_map"].keys() == want.keys()
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "pt") as opened:
            got = opened.get_tensor(name)
            assert got.dtype == want[name].dtype
            assert torch.equal(got, want[name]), name
    assert all((folder / name).stat().st_size < 1500 + 4096 for name in files)


def save_as_if_large(output: str, seed: int, fault: str = "", one_file: bool = False) -> tuple[str, list[str], int]:
    gather.ONE_FILE = 1500  # this process is of this call's ranks only
    try:
        return save(output, seed, fault, assembly.LIMIT, one_file)
    finally:
        gather.ONE_FILE = 256 << 20


def test_a_model_that_would_fit_one_file_is_written_by_all_ranks_unless_it_is_small(
    ranks: Ranks, tmp_path: Path
) -> None:
    results = ranks.run(3, save_as_if_large, str(tmp_path / "large"), 5)
    assert [what for what, _, _ in results] == [""] * 3
    assert [len(wrote) for _, wrote, _ in results] == [1, 1, 1]
    assert not any(asked for _, _, asked in results), "no tensor was sent to rank 0 to be written there"
    CheckpointManager(tmp_path / "large").verify(tmp_path / "large" / "checkpoint-1", "full")
    small = ranks.run(3, save, str(tmp_path / "small"), 5, "", assembly.LIMIT)
    assert all(what.startswith("not together") for what, _, _ in small)


@pytest.mark.parametrize(("count", "seed"), [(2, 5), (4, 5), (4, 11)])
def test_one_file_that_all_ranks_write_is_the_one_that_a_single_rank_writes(
    count: int, seed: int, ranks: Ranks, tmp_path: Path
) -> None:
    results = ranks.run(count, save_as_if_large, str(tmp_path), seed, "", True)
    assert [what for what, _, _ in results] == [""] * count
    assert not any(asked for _, _, asked in results), "no tensor was sent to rank 0 to be written there"
    assert sum(bool(wrote) for _, wrote, _ in results) > 1, "more than one rank wrote"
    folder = tmp_path / "checkpoint-1"
    CheckpointManager(tmp_path).verify(folder, "full")
    (alone,) = write_shards(tmp_path, "alone", wanted().items())
    assert [path.name for path in folder.glob("model*")] == ["model.safetensors"], "and no index"
    assert (folder / "model.safetensors").read_bytes() == alone.read_bytes()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("not a number", "not numbers"),
        ("missing", "has nothing of g"),
        ("other disk", "not together"),
        ("failing device", "illegal memory access"),
        ("failing check", "no memory for a check"),
    ],
)
def test_a_fault_of_one_rank_of_those_that_write_one_file_leaves_no_checkpoint(
    fault: str, said: str, ranks: Ranks, tmp_path: Path
) -> None:
    results = ranks.run(3, save_as_if_large, str(tmp_path), 5, fault, True)
    assert all(said in what for what, _, _ in results), results
    assert not (tmp_path / "checkpoint-1").exists()
    assert ranks.run(3, save_as_if_large, str(tmp_path), 5, "", True)[0][0] == "", "the next save is fine"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("full disk", "No space left on device"),
        ("not a number", "not numbers"),
        ("missing", "has nothing of g"),
        ("other disk", "not together"),
        ("failing device", "illegal memory access"),
        ("failing check", "no memory for a check"),
    ],
)
def test_a_fault_of_one_rank_ends_the_save_on_all_and_leaves_no_checkpoint(
    fault: str, said: str, ranks: Ranks, tmp_path: Path
) -> None:
    results = ranks.run(3, save, str(tmp_path), 5, fault)
    assert all(said in what for what, _, _ in results), results
    assert not (tmp_path / "checkpoint-1").exists()
    assert ranks.run(3, save, str(tmp_path), 5)[0][0] == "", "the next save is fine"
