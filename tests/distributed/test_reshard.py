"""One checkpoint format for all layouts: saved under any, loaded under any other, and the curve goes on.

Each arrow is two real runs of `erniekit train` on gloo ranks with the recorded tiny ERNIE.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from erniekit.checkpoint import assembly
from erniekit.files import RECORD
from faults.results import fault
from support.ranks import Ranks
from support.recorded import tiny_folder, whole_rows
from support.stored import stored_digests

pytestmark = pytest.mark.xdist_group("ranks")

PACKS = 4  # a step, whatever the layout
WORDS = dict(
    tp="tensor_parallel_degree",
    pp="pipeline_parallel_degree",
    fsdp="sharding_parallel_degree",
    cp="context_parallel_degree",
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2": dict(dp=2),
    "tp2": dict(tp=2, sequence_parallel=True),
    "pp2": dict(pp=2),
    "fsdp2": dict(fsdp=2, sharding="stage3"),
    "cp2": dict(cp=2),
    "tp2pp2": dict(tp=2, pp=2),
    "tp2fsdp2": dict(tp=2, fsdp=2, sharding="stage2"),
}
# Every layout as source and as target, 24 arrows: each goes to the three that follow it in the list. Three of them at
# every commit.
NAMES = list(LAYOUTS)
PAIRS = [
    pytest.param(a, NAMES[(i + k) % len(NAMES)], marks=[pytest.mark.full] if k > 1 or i % 2 or i > 5 else [])
    for i, a in enumerate(NAMES)
    for k in (1, 2, 3)
]


def size(layout: dict[str, Any]) -> int:
    out = 1
    for axis in ("dp", "tp", "pp", "fsdp", "cp"):
        out *= layout.get(axis, 1)
    return out


def run(layout: dict[str, Any], cache: str, keys: dict[str, Any]) -> None:
    import erniekit

    os.environ["ERNIEKIT_CACHE"] = cache
    data_ranks = layout.get("dp", 1) * layout.get("fsdp", 1)
    axes = {WORDS[a]: n for a, n in layout.items() if a in WORDS}
    extra = {k: v for k, v in layout.items() if k in ("sharding", "sequence_parallel")}
    values = dict(
        fine_tuning="Full", compute_type="fp32", max_seq_len=96, learning_rate=1e-3, max_steps=6, report_to="none",
        device="cpu", doctor="off", gradient_accumulation_steps=PACKS // data_ranks, lr_scheduler_type="constant",
    )  # fmt: skip
    erniekit.run("train", **{**values, **axes, **extra, **keys})


@pytest.fixture(scope="module")
def place(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reshard")
    tiny_folder(paddle, folder / "model")
    whole_rows(paddle, folder / "rows.jsonl")
    return folder


def go(ranks: Ranks, place: Path, name: str, output: str, **keys: Any) -> Path:
    layout = LAYOUTS[name]
    fixed = dict(model_name_or_path=place / "model", train_dataset_path=place / "rows.jsonl", output_dir=place / output)
    ranks.run(size(layout), run, layout, str(place / "cache"), {**fixed, **keys})
    return place / output


def files(folder: Path) -> dict[str, str]:
    found = stored_digests(folder)
    assert "model.safetensors" in found
    assert any(name.startswith("optimizer ") for name in found)
    return {name: digest for name, digest in found.items() if not name.startswith("master_weights")}


def curve(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


@pytest.fixture(scope="module")
def started(ranks: Ranks, place: Path) -> Callable[[str], Path]:
    """A whole run under a layout, with a checkpoint of step 3 of 6; made once."""
    return cache(lambda name: go(ranks, place, name, f"from-{name}", save_steps=3))


def run_with_small_files(layout: dict[str, Any], cache: str, keys: dict[str, Any]) -> None:
    whole, assembly.LIMIT = assembly.LIMIT, 40_000
    try:
        run(layout, cache, keys)
    finally:
        assembly.LIMIT = whole


@pytest.mark.parametrize(
    "name", ["fsdp2", *(pytest.param(n, marks=pytest.mark.full) for n in ("tp2", "pp2", "tp2fsdp2"))]
)
def test_a_model_of_several_files_is_written_by_all_ranks_and_read_by_one(
    name: str, ranks: Ranks, place: Path, started: Callable[[str], Path]
) -> None:
    layout, output = LAYOUTS[name], place / f"files-{name}"
    keys = dict(model_name_or_path=place / "model", train_dataset_path=place / "rows.jsonl", output_dir=output)
    ranks.run(size(layout), run_with_small_files, layout, str(place / "cache"), {**keys, "save_steps": 3})
    point, want = output / "checkpoint-3", started(name) / "checkpoint-3"
    assert len(list(point.glob("model-*-of-*.safetensors"))) > 2
    assert not (point / "model.safetensors").exists()
    again = go(ranks, place, "one", f"one-{name}", resume_from_checkpoint=point, max_steps=3, override_resume=True)
    assert files(again / "checkpoint-3") == files(want)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_weights_and_optimiser_come_through_bit_for_bit(
    source: str, target: str, ranks: Ranks, place: Path, started: Callable[[str], Path]
) -> None:
    """Loaded under the target layout and saved from there again: the same bytes."""
    point = started(source) / "checkpoint-3"
    keys = dict(resume_from_checkpoint=point, max_steps=3, override_resume=True)
    with fault("R2", "weights and optimiser loaded under another layout and saved again") as row:
        row.count = 1
        again = go(ranks, place, target, f"{source}-to-{target}", **keys)
        row.hits, row.differing = 1, int(files(again / "checkpoint-3") != files(point))
        assert files(again / "checkpoint-3") == files(point)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] if i % 2 or i > 5 else []) for i, n in enumerate(NAMES)]
)
def test_every_layout_draws_the_curve_of_one_process(name: str, started: Callable[[str], Path]) -> None:
    assert curve(started(name)) == pytest.approx(curve(started("one")), abs=2e-6)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("one", "tp2pp2"),
        ("fsdp2", "one"),
        *(pytest.param(*p, marks=pytest.mark.full) for p in (("tp2", "pp2"), ("pp2", "fsdp2"))),
        *(pytest.param(*p, marks=pytest.mark.full) for p in (("cp2", "dp2"), ("tp2fsdp2", "cp2"))),
    ],
)
def test_the_curve_goes_on_when_the_layout_changes(
    source: str, target: str, ranks: Ranks, place: Path, started: Callable[[str], Path]
) -> None:
    mine = place / f"on-{source}-{target}"
    shutil.copytree(started(source) / "checkpoint-3", mine / "checkpoint-3")
    for name in ("metrics.jsonl", RECORD):
        shutil.copyfile(started(source) / name, mine / name)
    with fault("R2", "a run that goes on under another layout: its losses") as row:
        row.count = 1
        go(ranks, place, target, mine.name)
        row.hits, row.differing = 1, 0
        assert curve(mine) == pytest.approx(curve(started("one")), abs=2e-6)


LEAN = {
    "8bit": dict(optim_states="8bit"),
    "exact16 8bit": dict(optim_states="8bit", master_weights="exact16", compute_type="bf16"),
    "none": dict(master_weights="none", compute_type="bf16"),
}


@pytest.mark.parametrize(
    ("lean", "source", "target"),
    [
        ("8bit", "one", "fsdp2"),
        *(
            pytest.param(*p, marks=pytest.mark.full)
            for p in (("8bit", "fsdp2", "pp2"), ("exact16 8bit", "one", "pp2"), ("none", "pp2", "dp2"))
        ),
    ],
)
def test_states_in_few_bytes_come_through_bit_for_bit(
    lean: str, source: str, target: str, ranks: Ranks, place: Path
) -> None:
    first = go(ranks, place, source, f"{lean} from-{source}", max_steps=2, **LEAN[lean])
    keys = dict(resume_from_checkpoint=first / "checkpoint-2", max_steps=2, override_resume=True)
    again = go(ranks, place, target, f"{lean} {source}-to-{target}", **keys, **LEAN[lean])
    one, other = (stored_digests(folder / "checkpoint-2") for folder in (first, again))
    assert "model.safetensors" in one
    kinds = {name.partition(" ")[0] for name in one}
    assert "optimizer" in kinds
    assert ("master_weights" in kinds) == (lean != "8bit")
    assert one == other
