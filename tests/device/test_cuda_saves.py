"""Saves from a card: copies that training cannot change any more, gathered and written; parts read straight into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from erniekit.checkpoint.collective import CollectiveSaves
from erniekit.checkpoint.host_copies import HostCopies
from erniekit.checkpoint.manager import CheckpointManager
from erniekit.checkpoint.shards import write_shards
from erniekit.checkpoint.slices import TensorFiles, fill_boxes
from erniekit.devices import pick
from erniekit.models.names import transposed
from erniekit.parallel.mesh import World
from support.fake_sharding import FakeSharding, Held

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card"),
]


def test_copies_are_pinned_reused_and_finished_before_training_goes_on():
    copies = HostCopies(pick("gpu"))
    weights = {f"w{k}": torch.full((2048, 4096), float(k), device="cuda") for k in range(8)}
    places = []
    for turn in range(3):
        got = copies.take(weights)
        for tensor in weights.values():
            tensor.add_(100.0)  # queued at once, behind the copies or not at all
        assert [float(t.min()) for t in got.values()] == [100.0 * turn + k for k in range(8)]
        assert [float(t.max()) for t in got.values()] == [100.0 * turn + k for k in range(8)]
        assert all(t.is_pinned() for t in got.values())
        places.append([t.data_ptr() for t in got.values()])
    assert places[0] == places[1] == places[2]


@pytest.mark.parametrize("async_save", [False, True])
def test_a_save_holds_what_the_card_had(tmp_path: Path, async_save: bool):
    shapes = {"a": (300, 200), "b": (70,)}
    sharding = FakeSharding(shapes, {name: [Held(((0, shape[0]),))] for name, shape in shapes.items()})
    weights = {name: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for name, shape in shapes.items()}
    before = {name: tensor.to("cpu", copy=True) for name, tensor in weights.items()}

    def write(folder: Path, whole: Any) -> None:
        write_shards(folder, "model", whole["weights"].items())

    with CheckpointManager(tmp_path, async_save=async_save) as manager:
        saves = CollectiveSaves(manager, World(), sharding, pick("gpu"))  # type: ignore[arg-type]
        saves.save(1, {"weights": weights}, write)
        for tensor in weights.values():
            tensor.zero_()
        saves.close()
    stored = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in before.items())


def test_a_part_is_read_straight_into_the_cards_memory(tmp_path: Path):
    whole = torch.randn(64, 48)
    save_file({"a": whole.t().contiguous()}, tmp_path / "f.safetensors")
    sharding = FakeSharding({"w": (64, 48)}, {"w": [Held(((8, 40),), ((12, 24), (30, 48)))]})
    out = torch.zeros(sharding.local_shape("w", 0), device="cuda", dtype=torch.bfloat16)
    fill_boxes(TensorFiles({"a": tmp_path / "f.safetensors"}), transposed("w", "a"), sharding.boxes("w", 0), out)
    assert torch.equal(out.cpu(), sharding.local("w", 0, whole).bfloat16())
