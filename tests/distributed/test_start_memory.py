"""No rank ever holds the whole model: while it starts, its memory grows by its own part of the weights, hardly more.

Half a GiB of weights and 2 GiB, in `make test-full`; real values in sharded files, and they must arrive.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.config import load
from erniekit.devices import pick
from erniekit.models import MODELS
from erniekit.models.config import DecoderConfig
from erniekit.parallel.gradients import local
from erniekit.parallel.world import open_world
from erniekit.recipes import stage_of
from erniekit.recipes.build import build
from erniekit.recipes.run_plan import decide
from support.memory import memory
from support.ranks import Ranks

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif(sys.platform != "linux", reason="a process's peak memory is read from Linux's /proc"),
]

MB = 1 << 20
SPARE = 96 * MB  # two chunks of 32 MiB while reading, and what malloc has not given back
SIZES = {"half a GiB": (3, 490, 560), "2 GiB": (20, 1900, 2100)}  # layers; MiB in bf16, from and to
LAYOUTS = {
    "tp2 x sharding 2": ["tensor_parallel_degree=2", "sharding_parallel_degree=2", "sharding=stage3"],
    "tp4": ["tensor_parallel_degree=4"],
}
CASES = [
    pytest.param("tp2 x sharding 2", "half a GiB", marks=pytest.mark.full),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (("tp2 x sharding 2", "2 GiB"), ("tp4", "2 GiB"))),
]


def config(layers: int) -> DecoderConfig:
    return DecoderConfig(
        family="llama", vocab_size=32000, hidden_size=2048, intermediate_size=5504, num_layers=layers, num_heads=16,
        num_kv_heads=4, head_dim=128, rms_norm_eps=1e-5, rope_theta=1e4, rope_style="halves", max_positions=2048,
        tie_word_embeddings=False,
    )  # fmt: skip


def write(folder: Path, layers: int) -> int:
    """One tensor in memory at a time, in files of 200 MB. Returns the bytes of all weights."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in MODELS.get("llama").build(config(layers)).named_parameters()}
    noise = torch.empty(max(s.numel() for s in shapes.values()) + 65536, dtype=torch.bfloat16)
    noise.view(torch.int16).random_(0x3000, 0x4000, generator=torch.Generator().manual_seed(0))  # 4e-10 to 2

    def value(name: str) -> torch.Tensor:
        at = int.from_bytes(hashlib.sha256(name.encode()).digest()[:2], "little")
        return noise[at : at + shapes[name].numel()].view(shapes[name])

    files = write_model(folder, config(layers), value, max_shard_size=0.2)
    assert len(files) > 2
    return sum(s.numel() for s in shapes.values()) * 2


def start(path: str, keys: list[str], read_whole: bool = False) -> tuple[int, int, list[str]]:
    """Bytes this rank holds, bytes its memory grew by at the worst moment, and weights that are not those of the file.
    fully_shard keeps fp32, other layouts the dtype of the file."""
    cfg = load([f"model_name_or_path={path}", "fine_tuning=Full", "train_dataset_path=none", *keys])
    world, folder = open_world(cfg.parallel, pick("cpu")), ModelFolder(Path(path))
    world.max(0.0)  # connections are made
    import torch._dynamo  # and what fully_shard imports: more with each release of torch
    import torch.distributed.fsdp

    before = memory("VmRSS")
    mistake = folder.build() if read_whole else None
    built = build(decide(cfg, pick("cpu", True), world, folder), stage_of(cfg))
    del mistake
    grown = memory("VmHWM") - before
    held = {name: local(param.detach()) for name, param in built.parameters()}
    wrong = []
    for entry in folder.entries():
        name = entry.ours
        if not name.startswith("layers.") or name.startswith("layers.1."):
            whole, boxes = folder.read(entry).to(held[name].dtype), built.sharding.boxes(name, world.rank)
            same = [torch.equal(held[name][box.local_slices], whole[box.global_slices]) for box in boxes]
            wrong += [] if same and all(same) else [name]
    return sum(t.numel() * t.element_size() for t in held.values()), grown, wrong


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path)  # gigabytes


@pytest.fixture
def fresh() -> Iterator[Ranks]:
    """Processes whose peak memory is of nothing else."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.mark.parametrize(("layout", "size"), CASES)
def test_a_rank_that_starts_holds_its_own_part_only(layout: str, size: str, folder: Path, fresh: Ranks) -> None:
    layers, least, most = SIZES[size]
    total = write(folder, layers)
    assert least * MB < total < most * MB
    part = total / 4 * (2 if "sharding" in layout else 1)
    for held, grown, wrong in fresh.run(4, start, str(folder), LAYOUTS[layout]):
        print(f"{layout}, {size}: holds {held / MB:.0f} MiB, grew by {grown / MB:.0f} at most")
        assert wrong == []
        assert part <= held < 1.01 * part, "a quarter, and all of the norms"
        assert grown < held + SPARE


@pytest.mark.full
def test_the_measure_would_see_a_rank_that_holds_it_all(folder: Path, fresh: Ranks) -> None:
    total = write(folder, SIZES["half a GiB"][0])
    ((held, grown, _),) = fresh.run(1, start, str(folder), [], True)
    assert grown > held + total - SPARE // 2 > held + SPARE
