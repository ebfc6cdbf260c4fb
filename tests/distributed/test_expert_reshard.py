"""A checkpoint does not know where its experts were: saved under one spread, loaded under another, bit for bit.

Each arrow is two real runs of `erniekit train` on gloo ranks with the recorded tiny ERNIE MoE.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from distributed.test_reshard import curve, files, run, size
from support.ranks import Ranks
from support.recorded import tiny_folder, whole_rows

pytestmark = pytest.mark.xdist_group("ranks")

EP = dict(moe_group="ep")
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one": ({}, {}),
    "tp2 over tp": (dict(tp=2, sequence_parallel=True), dict(moe_group="mp")),
    "dp2 over data": (dict(dp=2), dict(EP, moe_multimodal_dispatch_use_allgather="v2-unpad")),
    "sharding 2 over data": (dict(fsdp=2, sharding="stage3"), EP),
    "tp2 inside experts": (dict(tp=2), {}),
    "sharding 4 in two copies": (dict(fsdp=4, sharding="stage1"), dict(EP, expert_parallel_degree=2)),
    "tp2 dp2 over data": (dict(tp=2, dp=2), EP),
    "pp2 dp2 over data": (dict(pp=2, dp=2), EP),
    "tp2 dp2 over all": (dict(tp=2, dp=2, sequence_parallel=True), dict(moe_group="world")),
}
HEAVY = [name for name, (layout, _) in LAYOUTS.items() if size(layout) > 2]
NAMES = list(LAYOUTS)


def arrows(*steps: int) -> list[Any]:
    """Each layout to those that follow it in the list."""
    pairs = [(a, NAMES[(i + k) % len(NAMES)]) for k in steps for i, a in enumerate(NAMES)]
    return [pytest.param(*p, marks=pytest.mark.full) if {*p} & {*HEAVY} or i > 0 else p for i, p in enumerate(pairs)]


def named(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.full) if name in HEAVY else name for name in names]


@pytest.fixture(scope="module")
def place(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    tiny_folder(paddle, folder / "model", "moe_old")
    whole_rows(paddle, folder / "rows.jsonl")
    return folder


def go(ranks: Ranks, place: Path, name: str, output: str, **keys: Any) -> Path:
    layout, words = LAYOUTS[name]
    paths = dict(model_name_or_path=place / "model", train_dataset_path=place / "rows.jsonl", output_dir=place / output)
    fixed: dict[str, Any] = dict(paths, learning_rate=1e-4)
    ranks.run(size(layout), run, layout, str(place / "cache"), {**fixed, **words, **keys})
    return place / output


_started: dict[str, Path] = {}


def started(ranks: Ranks, place: Path, name: str) -> Path:
    """A whole run under this layout, with a checkpoint of step 3 of 6; made once."""
    if name not in _started:
        _started[name] = go(ranks, place, name, f"from-{name}", save_steps=3)
    return _started[name]


@pytest.mark.parametrize(("source", "target"), arrows(1))
def test_experts_come_through_bit_for_bit(source: str, target: str, ranks: Ranks, place: Path) -> None:
    """Loaded under the target layout and saved from there again: the same bytes of weights and optimiser."""
    point = started(ranks, place, source) / "checkpoint-3"
    keys = dict(resume_from_checkpoint=point, max_steps=3, override_resume=True)
    again = go(ranks, place, target, f"{source}-to-{target}", **keys)
    assert files(again / "checkpoint-3") == files(point)


@pytest.mark.full
@pytest.mark.parametrize("name", named(*NAMES[1:]))
def test_every_spread_draws_the_curve_of_one_process(name: str, ranks: Ranks, place: Path) -> None:
    # Losses of 8 are 1e-6 apart in fp32, and Adam divides by what little an expert with few tokens learns.
    assert curve(started(ranks, place, name)) == pytest.approx(curve(started(ranks, place, "one")), abs=2e-6)


# Full fine-tuning of this model with today's Hugging Face Trainer does not: interrupted and resumed it ends with other
# weights than undisturbed. Here not a bit differs.
@pytest.mark.parametrize("name", named("one", "dp2 over data", "sharding 4 in two copies"))
def test_full_fine_tuning_of_a_moe_resumes_bit_exactly(name: str, ranks: Ranks, place: Path) -> None:
    whole = started(ranks, place, name)
    mine = place / f"resumed-{name}"
    shutil.copytree(whole / "checkpoint-3", mine / "checkpoint-3")
    go(ranks, place, name, mine.name, save_steps=3)
    assert files(mine / "checkpoint-6") == files(whole / "checkpoint-6")
    assert files(whole / "checkpoint-6") != files(whole / "checkpoint-3"), "it did train on"
