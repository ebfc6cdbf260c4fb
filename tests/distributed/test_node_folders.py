"""Nodes without a shared disk: each rank of these tests is a node of its own, with a folder of its own."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from erniekit.checkpoint import manifest, nodes, writer
from erniekit.checkpoint.collective import CollectiveSaves
from erniekit.checkpoint.manager import CheckpointManager
from erniekit.checkpoint.manifest import unreadable
from erniekit.checkpoint.nodes import agree_on_checkpoint, copier, copy_to_nodes, nodes_without
from erniekit.checkpoint.shards import write_shards
from erniekit.devices import pick
from erniekit.errors import CheckpointError
from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from erniekit.recipes.finish import publish_on_nodes
from support.fake_sharding import FakeSharding, Held
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")


def node_folder(root: str, rank: int | None = None) -> Path:
    folder = Path(root) / f"node{dist.get_rank() if rank is None else rank}" / "output"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def publish(folder: Path, step: int, value: float = 0.0) -> Path:
    """A checkpoint with a large file, a small one, an empty one and one in a folder."""

    def write(target: Path) -> None:
        save_file({"w": torch.full((300, 100), step + value)}, target / "model.safetensors")
        (target / "state.json").write_text(json.dumps({"step": step}))
        (target / "empty").touch()
        (target / "more").mkdir()
        (target / "more" / "notes.txt").write_text("n")

    return writer.publish(folder, f"checkpoint-{step}", write, info={"step": step})


def failure(work: Callable[[], Any]) -> str:
    try:
        work()
    except CheckpointError as error:
        return str(error)
    return ""


def same_files(one: Path, other: Path) -> bool:
    files = [{p.relative_to(f): p.read_bytes() for p in f.rglob("*") if p.is_file()} for f in (one, other)]
    return files[0] == files[1] and len(files[0]) == 5


# --- is it shared? ---


def look(root: str, places: list[int], leaders: list[int]) -> tuple[bool, list[int]]:
    """places: which node's folder each rank sees."""
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    folder = node_folder(root, places[rank])
    shared = not nodes_without(folder, leaders, rank, group)
    return shared, nodes_without(folder, leaders, rank, group)


def test_nodes_find_out_whether_they_share_a_folder(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(4, look, str(tmp_path), [0, 0, 0, 0], [0, 2]) == [(True, [])] * 4
    assert ranks.run(4, look, str(tmp_path), [0, 0, 2, 2], [0, 2]) == [(False, [2])] * 4
    assert ranks.run(4, look, str(tmp_path), [0, 0, 0, 3], [0, 1, 2, 3]) == [(False, [3])] * 4
    assert not [p for p in tmp_path.rglob("*") if p.is_file()], "nothing is left behind"


def test_one_process_shares_with_itself(tmp_path: Path) -> None:
    assert not nodes_without(tmp_path, [0], 0, None)


def look_in_vain(root: str) -> str:
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    folder = Path(root) / "file" / "below" if rank == 0 else Path(root)
    return failure(lambda: nodes_without(folder, [0, 1], rank, group))


def test_a_folder_rank_0_cannot_write_stops_all(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = ranks.run(2, look_in_vain, str(tmp_path))
    assert all("rank 0 cannot write into" in error for error in told)


# --- copies ---


def copy_all(root: str, fault: str = "", chunk: int = 10_000) -> str:
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo")
    usual, nodes.CHUNK = nodes.CHUNK, chunk
    folder = node_folder(root)
    path = publish(folder, 3) if rank == 0 else folder / "checkpoint-3"
    if fault == "source flips a bit" and rank == 0:
        data = bytearray((path / "model.safetensors").read_bytes())
        data[5000] ^= 1
        (path / "model.safetensors").write_bytes(bytes(data))
    if fault == "source lost a file" and rank == 0:
        (path / "state.json").unlink()
    if fault == "source lost its manifest" and rank == 0:
        (path / manifest.MANIFEST).unlink()
    if fault == "source is of a later version" and rank == 0:
        found, own = manifest.Manifest.from_bytes((path / manifest.MANIFEST).read_bytes()), manifest.FORMAT
        manifest.FORMAT = own + 1  # type: ignore[misc]
        (path / manifest.MANIFEST).write_bytes(found.to_bytes())
        manifest.FORMAT = own  # type: ignore[misc]
    real = writer.ops.write
    if fault == "full disk" and rank == 1:
        left = [20_000]

        def write(fd: int, data: memoryview) -> int:
            left[0] -= len(data)
            if left[0] < 0:
                raise OSError(28, "No space left on device")
            return real(fd, data)

        writer.ops.write = write  # type: ignore[method-assign]
    try:
        return failure(lambda: copy_to_nodes(path, list(range(1, world)), rank, group, timeout=30))
    finally:
        writer.ops.write, nodes.CHUNK = real, usual  # type: ignore[method-assign]


def test_a_checkpoint_reaches_every_node_whole(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(4, copy_all, str(tmp_path)) == [""] * 4
    source = tmp_path / "node0" / "output" / "checkpoint-3"
    for node in (1, 2, 3):
        there = tmp_path / f"node{node}" / "output" / "checkpoint-3"
        manifest.check(there, "full")
        assert same_files(source, there), "its manifest too"
        assert not list(there.parent.glob(".*"))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("source flips a bit", "model.safetensors arrived with other bytes"),
        ("source lost a file", "state.json arrived with other bytes"),
        ("source lost its manifest", "MANIFEST.json cannot be read at its source"),
        ("source is of a later version", "MANIFEST.json cannot be read at its source: MANIFEST.json has format 2"),
    ],
)
def test_a_damaged_source_is_published_nowhere(ranks: Ranks, tmp_path: Path, fault: str, words: str) -> None:
    source, *others = ranks.run(3, copy_all, str(tmp_path), fault)
    assert "did not reach 2 of 2 other nodes" in source
    assert f"the node of rank 1: {words}" in source
    assert others == ["", ""]
    assert not [p for n in (1, 2) for p in (tmp_path / f"node{n}" / "output").iterdir()]


def test_a_node_whose_disk_is_full_still_passes_on_to_the_next(ranks: Ranks, tmp_path: Path) -> None:
    source, *_ = ranks.run(3, copy_all, str(tmp_path), "full disk")
    assert "did not reach 1 of 2 other nodes" in source
    assert "the node of rank 1: checkpoint-3 was not written: No space left on device" in source
    assert not list((tmp_path / "node1" / "output").iterdir())
    manifest.check(tmp_path / "node2" / "output" / "checkpoint-3", "full")


# --- every save on every node ---


def save_on_all_nodes(root: str) -> list[str]:
    """Five saves that keep two; a checkpoint that is not ours, and one of an abandoned branch, are there before."""
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    world, folder = World(Layout(dp=dist.get_world_size()), rank), node_folder(root)
    manager = CheckpointManager(folder, keep_last=2, async_save=True)
    if rank == 0:
        manager.start()
    else:
        publish(folder, 90)
        (folder / "checkpoint-1x").mkdir()

    sharding = FakeSharding({"w": (4,)}, {"w": [Held(((0, 4),)), None, None]})
    after = copier(manager, [1, 2], rank, group)
    saves = CollectiveSaves(manager, world, sharding, pick("cpu"), group, after=after)  # type: ignore[arg-type]

    def write(target: Path, whole: Any) -> None:
        write_shards(target, "model", whole["weights"].items())

    for step in range(1, 6):
        weights = {"w": torch.full((4,), float(step))} if rank == 0 else {}
        saves.save(
            step, {"weights": weights}, lambda f, whole: write_shards(f, "model", whole["weights"].items()) and None
        )
    saves.close()
    if rank == 0:
        manager.close()
    return sorted(p.name for p in folder.iterdir())


def test_saves_and_their_rotation_are_the_same_on_every_node(ranks: Ranks, tmp_path: Path) -> None:
    first, *others = ranks.run(3, save_on_all_nodes, str(tmp_path))
    assert first == ["checkpoint-4", "checkpoint-5"]
    assert others == [["checkpoint-1x", "checkpoint-4", "checkpoint-5", "checkpoint-90.aside-1"]] * 2
    for node in range(3):
        folder = tmp_path / f"node{node}" / "output"
        assert load_file(folder / "checkpoint-5" / "model.safetensors")["w"].tolist() == [5.0] * 4
        assert CheckpointManager(folder).latest_good() == folder / "checkpoint-5"


# --- the end of a run ---


def end_of_run(root: str, shared: bool) -> str:
    """Rank 2's node has no copy of the last checkpoint; all have weights that no record of ours lists."""
    rank, world = dist.get_rank(), World(Layout(dp=dist.get_world_size()), dist.get_rank())
    world.leaders = [0, 1, 2]
    folder = node_folder(root, 0) if shared else node_folder(root)
    if rank == 0 or not shared:
        (folder / "model-00002-of-00002.safetensors").write_bytes(b"old")
    if rank == 0 or (rank == 1 and not shared):
        publish(folder, 9)
    dist.barrier()
    said = io.StringIO()
    with redirect_stderr(said):
        publish_on_nodes(folder / "checkpoint-9", folder, world)
    return said.getvalue()


def test_the_final_model_appears_on_every_node_that_has_the_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    told = ranks.run(3, end_of_run, str(tmp_path), False)
    there = [{p.name for p in (tmp_path / f"node{n}" / "output").iterdir() if p.is_file()} for n in range(3)]
    old = "model-00002-of-00002.safetensors"
    assert there[0] == {old}, "rank 0's own is not published by this"
    assert there[1] == {"model.safetensors", "empty", ".erniekit-files", old}, "what no record lists stays"
    first, second = (tmp_path / "node1" / "output" / name for name in ("model.safetensors", "checkpoint-9"))
    assert load_file(first)["w"][0, 0] == 9.0
    assert first.read_bytes() == (second / "model.safetensors").read_bytes()
    assert there[2] == {old}, "what is there stays where there is nothing better"
    assert "no final model on the node of rank 2: no checkpoint folder at" in told[0]


def test_on_a_shared_folder_the_other_nodes_publish_nothing(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(3, end_of_run, str(tmp_path), True) == [""] * 3
    assert {p.name for p in (tmp_path / "node0" / "output").iterdir() if p.is_file()} == {
        "model-00002-of-00002.safetensors"
    }


# --- resume ---


def agree(root: str, shared: bool) -> tuple[str, str]:
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    folder = node_folder(root, 0) if shared else node_folder(root)
    manager = CheckpointManager(folder)
    found: list[Path | None] = []
    leaders = [0, 1, 2] if not shared else [0, 1]
    error = failure(
        lambda: found.append(agree_on_checkpoint(manager.latest_good, folder, leaders, rank, group, shared, timeout=30))
    )
    return (str(found[0].relative_to(folder)) if found and found[0] else ""), error


def test_nobody_has_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(3, agree, str(tmp_path), False) == [("", "")] * 3


def test_nodes_that_lack_the_newest_receive_it_wherever_it_is(ranks: Ranks, tmp_path: Path) -> None:
    """Rank 0 lost its disk, rank 1 has the newest, rank 2 an older one and other bytes under the newest's name."""
    publish(node_folder(str(tmp_path), 1), 7)
    publish(node_folder(str(tmp_path), 2), 5)
    publish(node_folder(str(tmp_path), 2), 7, value=0.5)
    assert ranks.run(3, agree, str(tmp_path), False) == [("checkpoint-7", "")] * 3
    folders = [tmp_path / f"node{n}" / "output" / "checkpoint-7" for n in range(3)]
    assert same_files(folders[0], folders[1])
    assert same_files(folders[2], folders[1])
    assert (tmp_path / "node2" / "output" / "checkpoint-7.aside-1").is_dir(), "what was there is kept"
    assert (tmp_path / "node2" / "output" / "checkpoint-5").is_dir()


def test_a_damaged_newest_is_replaced_by_another_nodes_good_copy(ranks: Ranks, tmp_path: Path) -> None:
    for node in range(3):
        publish(node_folder(str(tmp_path), node), 4)
        publish(node_folder(str(tmp_path), node), 6)
    with (tmp_path / "node0" / "output" / "checkpoint-6" / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    assert ranks.run(3, agree, str(tmp_path), False) == [("checkpoint-6", "")] * 3
    manifest.check(tmp_path / "node0" / "output" / "checkpoint-6", "full")


def agree_while_rank_1_cannot_read(root: str) -> str:
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    folder = node_folder(root)

    def find() -> Path | None:
        if rank == 1:
            raise unreadable(folder / "checkpoint-6" / "model.safetensors", OSError(errno.EIO, "Input/output error"))
        return CheckpointManager(folder).latest_good()

    return failure(lambda: agree_on_checkpoint(find, folder, [0, 1, 2], rank, group, shared=False, timeout=30))


def test_a_node_that_cannot_read_its_disk_now_stops_all_rather_than_send_them_back(
    ranks: Ranks, tmp_path: Path
) -> None:
    for node, step in ((0, 4), (1, 6), (2, 4)):
        publish(node_folder(str(tmp_path), node), step)
    told = ranks.run(3, agree_while_rank_1_cannot_read, str(tmp_path))
    assert all("model.safetensors cannot be read: Input/output error; nothing was changed" in error for error in told)


def test_a_folder_of_that_name_without_a_manifest_is_not_replaced_on_a_node(ranks: Ranks, tmp_path: Path) -> None:
    publish(node_folder(str(tmp_path), 0), 7)
    theirs = node_folder(str(tmp_path), 2) / "checkpoint-7"
    theirs.mkdir()
    (theirs / "pytorch_model.bin").write_bytes(b"years of work")
    told = ranks.run(3, agree, str(tmp_path), False)
    assert all("did not reach 1 of 2 other nodes" in error for _, error in told)
    assert all("the node of rank 2: the checkpoint-7 there has no MANIFEST.json" in error for _, error in told)
    assert [path.name for path in theirs.parent.iterdir()] == ["checkpoint-7"]
    assert [path.name for path in theirs.iterdir()] == ["pytorch_model.bin"]


def test_on_a_shared_folder_rank_0s_word_counts(ranks: Ranks, tmp_path: Path) -> None:
    publish(node_folder(str(tmp_path), 0), 2)
    assert ranks.run(3, agree, str(tmp_path), True) == [("checkpoint-2", "")] * 3


def test_when_all_are_damaged_everyone_stops_with_the_same_words(ranks: Ranks, tmp_path: Path) -> None:
    path = publish(node_folder(str(tmp_path), 0), 2)
    (path / "state.json").unlink()
    told = ranks.run(3, agree, str(tmp_path), False)
    assert all("every checkpoint in this folder is damaged" in error for _, error in told)


def agree_on_a_path(root: str) -> str:
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    path = Path(root) / "elsewhere" / "checkpoint-9"
    return str(agree_on_checkpoint(lambda: path, node_folder(root), [0, 1], rank, group, shared=False, timeout=30))


def test_a_checkpoint_elsewhere_is_agreed_on_by_its_path(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    path = publish(tmp_path / "elsewhere", 9)
    assert ranks.run(2, agree_on_a_path, str(tmp_path)) == [str(path)] * 2
    manifest.check(path, "full")


def test_one_process_just_looks(tmp_path: Path) -> None:
    publish(tmp_path, 3)
    assert (
        agree_on_checkpoint(CheckpointManager(tmp_path).latest_good, tmp_path, [0], 0, None)
        == tmp_path / "checkpoint-3"
    )
