"""Adapters of runs on many ranks: a large one is written by all of them into its one file, which is the same file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from distributed.test_reshard import LAYOUTS, curve, run, size
from erniekit.checkpoint import gather, manifest, writer
from erniekit.checkpoint.manager import CheckpointManager
from erniekit.checkpoint.published import check_published
from erniekit.errors import CheckpointError
from erniekit.files.record import OwnedFiles
from support.ranks import Ranks
from support.recorded import tiny_folder, whole_rows

pytestmark = pytest.mark.xdist_group("ranks")

FILE = "adapter_model.safetensors"
EP2: dict[str, Any] = dict(moe_group="ep", moe_multimodal_dispatch_use_allgather="v2-unpad")
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tp2": ("dense_old", "tp2", {}),
    "fsdp2": ("dense_old", "fsdp2", {}),
    "pp2": ("dense_old", "pp2", dict(compat="erniekit")),  # one A for several projections
    "ep2": ("moe_old", "dp2", EP2),
    "fsdp2 with lengths": ("dense_old", "fsdp2", dict(use_dora=True)),
    "tp2 fsdp2": ("dense_old", "tp2fsdp2", {}),
}


@pytest.fixture(scope="module")
def place(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for family in ("dense_old", "moe_old"):
        tiny_folder(paddle, folder / family, family)
    whole_rows(paddle, folder / "rows.jsonl")
    return folder


def run_as_if_large(layout: dict[str, Any], cache: str, keys: dict[str, Any]) -> tuple[int, int]:
    """How many stretches of files of several ranks this rank wrote, and how many tensors it sent to rank 0."""
    wrote, sent = [0], [0]
    stretches, part, limit = writer.write_stretches, gather.Exchange._send_part, gather.ONE_FILE

    def counted(*given: Any) -> Any:
        out = stretches(*given)
        wrote[0] += len(out)
        return out

    def told(self: Any, name: str) -> None:
        sent[0] += name.endswith("/@weights")
        part(self, name)

    # This process is of this call's ranks only.
    gather.ONE_FILE, writer.write_stretches, gather.Exchange._send_part = 1500, counted, told  # type: ignore
    try:
        run(layout, cache, keys)
    finally:
        gather.ONE_FILE, writer.write_stretches, gather.Exchange._send_part = limit, stretches, part  # type: ignore
    return wrote[0], sent[0]


def go(ranks: Ranks, place: Path, case: str, output: str, work: Any, *more: Any, **keys: Any) -> Any:
    family, name, words = CASES[case]
    values = dict(
        model_name_or_path=place / family, train_dataset_path=place / "rows.jsonl", output_dir=place / output,
        fine_tuning="LoRA", lora_rank=8, max_steps=2, save_steps=1, compute_type="bf16",
    )  # fmt: skip
    keys = {**values, **words, **keys}
    return ranks.run(size(LAYOUTS[name]), work, LAYOUTS[name], str(place / "cache"), keys, *more)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.full] if c not in ("pp2", "ep2") else []) for c in CASES],
)
def test_all_ranks_write_the_file_that_one_rank_writes(case: str, ranks: Ranks, place: Path) -> None:
    go(ranks, place, case, f"{case}-one", run)
    results = go(ranks, place, case, f"{case}-all", run_as_if_large)
    assert all(wrote for wrote, _ in results), results
    assert not any(sent for _, sent in results), "a tensor was sent to rank 0 to be written there"
    for step in (1, 2):
        mine, want = (place / f"{case}-{how}" / f"checkpoint-{step}" for how in ("all", "one"))
        CheckpointManager(mine.parent).verify(mine, "full")
        for name in (FILE, "adapter_config.json"):
            assert (mine / name).read_bytes() == (want / name).read_bytes(), name
    assert curve(place / f"{case}-all") == curve(place / f"{case}-one")
    known_by_its_digest(place / f"{case}-all")


def known_by_its_digest(output: Path) -> None:
    """The final adapter is a copy, recorded with the checkpoint's digest; a byte of it changes, and it is not."""
    assert ":" in manifest.load(output / "checkpoint-2").files[FILE].sha256, "of stretches"
    assert check_published(output, "full").whole
    os.utime(output / FILE, (1, 1))  # so that its bytes are read
    assert OwnedFiles(output).is_ours(FILE)
    damaged = output.with_name(f"{output.name}-damaged")
    shutil.copytree(output, damaged)
    with (damaged / FILE).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert not OwnedFiles(damaged).is_ours(FILE)
    with pytest.raises(CheckpointError, match="is damaged"):
        check_published(damaged, "full")


def test_rank_0_writes_a_layout_whose_tensors_are_not_parts_of_ours(ranks: Ranks, place: Path) -> None:
    (wrote, _), (other, sent) = go(ranks, place, "fsdp2", "paddle", run_as_if_large, save_format="paddle")
    assert (wrote, other) == (0, 0)
    assert sent > 0, "rank 1 sent its parts"
    CheckpointManager(place / "paddle").verify(place / "paddle" / "checkpoint-2", "full")
