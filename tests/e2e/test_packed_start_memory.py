"""A packed base is read piece by piece: a start takes what is kept and one weight, whatever the sizes of the files.

What is kept lies on the device; here that is the host, so it is taken off. `RssAnon` is sampled: pages of files do not
count, and the kernel records no peak of it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.checkpoint.slices import CHUNK
from erniekit.config import load
from erniekit.devices import pick
from erniekit.models import MODELS
from erniekit.models.released import ERNIE_21B
from erniekit.parallel.world import open_world
from erniekit.recipes import stage_of
from erniekit.recipes.build import build
from erniekit.recipes.run_plan import decide
from support.memory import memory
from support.ranks import Ranks

pytestmark = [
    pytest.mark.full,
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif(sys.platform != "linux", reason="a process's memory is read from Linux's /proc"),
]

MB = 1 << 20
# One weight of 16 MiB, plain and packed, a chunk of it as it is read, a second copy of the adapters, and what torch
# loads at first use or malloc has not given back: the same for every size of model and file.
LIMIT = 2 * 16 * MB + CHUNK + 96 * MB
SHAPE = dict(
    vocab_size=2048, hidden_size=512, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=2,
    moe_num_experts=16, moe_k=2, moe_intermediate_size=512,
)  # fmt: skip


def write(folder: Path, layers: int, shard_gb: float) -> int:
    """Returns the bytes of its weights."""
    spec = MODELS.get("ernie4_5_moe")
    raw = {**ERNIE_21B, **SHAPE, "num_hidden_layers": layers, "moe_layer_end_index": layers - 1}
    config = spec.read_config(raw, "hf", False, "here")
    with torch.device("meta"):
        shapes = {name: param.shape for name, param in spec.build(config).named_parameters()}
    noise = torch.randn(max(s.numel() for s in shapes.values()), generator=torch.Generator().manual_seed(0)) * 0.02

    def value(name: str) -> torch.Tensor:
        return noise[: shapes[name].numel()].view(shapes[name]).bfloat16()

    write_model(folder, config, value, max_shard_size=shard_gb)
    return sum(2 * s.numel() for s in shapes.values())


class Sampled:
    """The most anonymous memory of this process while it is open, beyond what it had."""

    def __enter__(self) -> Sampled:
        self.before = self.most = memory("RssAnon")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.most = max(self.most, memory("RssAnon"))

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def grown(self) -> int:
        return self.most - self.before


def start(path: str, read_whole: bool = False) -> tuple[int, int]:
    """Bytes that the model keeps, and bytes by which memory grew at the worst moment."""
    words = [f"model_name_or_path={path}", "train_dataset_path=none", "compute_type=wint4/8", "device=cpu"]
    cfg, device = load(words), pick("cpu", True)
    world, folder = open_world(cfg.parallel, device), ModelFolder(Path(path))
    with Sampled() as watched:
        mistake = folder.build(torch.bfloat16) if read_whole else None
        built = build(decide(cfg, device, world, folder), stage_of(cfg))
        del mistake
    kept = [t for part in built.engine.parts for t in (*part.parameters(), *part.buffers())]
    return sum(t.nbytes for t in kept), watched.grown


@pytest.fixture
def fresh() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


@pytest.mark.parametrize(("layers", "shard_gb"), [(6, 5.0), (14, 5.0), (14, 0.04)])
def test_what_starting_takes_beside_the_packed_model_depends_on_neither_layers_nor_files(
    layers: int, shard_gb: float, tmp_path: Path, fresh: Ranks
) -> None:
    total = write(tmp_path / "model", layers, shard_gb)
    assert (len(list((tmp_path / "model").glob("*.safetensors"))) > 8) is (shard_gb < 1)
    ((kept, grown),) = fresh.run(1, start, str(tmp_path / "model"))
    print(f"{layers} layers: {total / MB:.0f} MiB read, {kept / MB:.0f} kept, {(grown - kept) / MB:.0f} beside them")
    assert kept < 0.5 * total
    assert grown - kept < LIMIT


def test_the_measure_would_see_a_model_that_is_read_whole(tmp_path: Path, fresh: Ranks) -> None:
    write(tmp_path / "model", 14, 5.0)
    ((kept, grown),) = fresh.run(1, start, str(tmp_path / "model"), True)
    assert grown - kept > 2 * LIMIT
