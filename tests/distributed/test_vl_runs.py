"""`erniekit train` of a vision model, on many ranks as on one: losses, checkpoints, and runs that go on elsewhere.

Real runs of `stage: VL-SFT` on gloo ranks with the recorded tiny ERNIE-4.5-VL. Rows with a picture and rows of text
take turns, so that with two data ranks the second reads text alone.
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
import torch

from distributed.test_reshard import WORDS, curve, size
from erniekit.files import RECORD
from support.jsonl import write_jsonl
from support.ranks import Ranks
from support.seen import MEDIA, rows, tiny_seeing
from support.stored import stored_digests

pytestmark = pytest.mark.xdist_group("ranks")

PACKS = 4  # a step, whatever the layout
STEPS = 4
SEEN = ("one_image", "two_images", "alpha", "two_turns", "tiny", "thinking", "video_lossless", "image_after_text")
EP = dict(moe_group="ep")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2": dict(dp=2),
    "tp2": dict(tp=2, sequence_parallel=True, moe_group="mp"),
    "pp2": dict(pp=2),
    "fsdp2": dict(fsdp=2, sharding="stage3"),
    "ep2": dict(dp=2, **EP),
    "cp2": dict(cp=2),
    "tp2pp2": dict(tp=2, pp=2, sequence_parallel=True),
    "fsdp2cp2": dict(fsdp=2, cp=2, sharding="stage3"),
    "tp2fsdp2ep2": dict(tp=2, fsdp=2, sequence_parallel=True, sharding="stage2", **EP),
}
TUNINGS: dict[str, dict[str, Any]] = {
    "full": dict(fine_tuning="Full"),
    "lora": dict(fine_tuning="LoRA", lora_rank=4, learning_rate=1e-2),
    "wint": dict(fine_tuning="LoRA", lora_rank=4, compute_type="wint4/8", learning_rate=1e-2),
    "frozen": dict(fine_tuning="Full", freeze_config="freeze_vision"),
}


def run(layout: dict[str, Any], keys: dict[str, Any]) -> None:
    """In a rank."""
    import erniekit

    torch.set_num_threads(1)
    data_ranks = layout.get("dp", 1) * layout.get("fsdp", 1)
    axes = {WORDS[a]: n for a, n in layout.items() if a in WORDS}
    extra = {k: v for k, v in layout.items() if k in ("sharding", "sequence_parallel", "moe_group")}
    values = dict(
        stage="VL-SFT", compute_type="fp32", max_seq_len=192, learning_rate=1e-4, max_steps=STEPS, report_to="none",
        device="cpu", doctor="off", gradient_accumulation_steps=PACKS // data_ranks, lr_scheduler_type="constant",
        packing=False, random_shuffle=False, max_pixels=9408, variable_resolution=True, video_max_frames=4,
        video_min_frames=4, dataset_num_proc=1, media_num_proc=1,
    )  # fmt: skip
    erniekit.run("train", **{**values, **axes, **extra, **keys})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    tiny_seeing(folder / "model")
    shutil.copytree(MEDIA, folder / "media")
    written: list[Any] = []
    for number, name in enumerate(SEEN):
        answer = " ".join(["the red bar stands at the edge."] * (1 + number % 3))
        written += [rows()[name], {"src": [f"how many stars are {number}?"], "tgt": [answer]}]
    write_jsonl(folder / "rows.jsonl", written)
    return folder


def go(ranks: Ranks, place: Path, tuning: str, name: str, output: str, **keys: Any) -> Path:
    paths = dict(model_name_or_path=place / "model", train_dataset_path=place / "rows.jsonl", output_dir=place / output)
    fixed = dict(paths, cache_dir=place / "cache", **TUNINGS[tuning])
    layout = LAYOUTS[name]
    ranks.run(size(layout), run, layout, {**fixed, **keys})
    return place / output


@pytest.fixture(scope="module")
def started(ranks: Ranks, place: Path) -> Callable[[str, str], Path]:
    """A whole run under a layout, with a checkpoint in the middle; made once."""
    return cache(lambda tuning, name: go(ranks, place, tuning, name, f"{tuning}-{name}", save_steps=STEPS // 2))


def files(folder: Path) -> dict[str, str]:
    """Weights (or adapters) and optimiser; the probe's logits may be added up in another order."""
    found = stored_digests(folder)
    assert any(name.startswith("optimizer ") for name in found)
    assert len(found) > 1
    return found


def cases(tuning: str, *often: str, full: tuple[str, ...] = ()) -> list[Any]:
    later = [pytest.param(tuning, name, marks=pytest.mark.full) for name in full]
    return [(tuning, name) for name in often] + later


LORA = ("tp2", "pp2", "fsdp2", "ep2", "cp2", "tp2fsdp2ep2")


@pytest.mark.parametrize(
    ("tuning", "name"),
    [
        *cases("full", "fsdp2", full=tuple(n for n in LAYOUTS if n not in ("one", "fsdp2"))),
        *cases("lora", full=LORA),
        *cases("wint", full=("tp2", "pp2", "dp2")),
        *cases("frozen", full=("fsdp2", "pp2", "ep2")),
    ],
)
def test_a_model_that_sees_draws_the_curve_of_one_process(
    tuning: str, name: str, started: Callable[[str, str], Path]
) -> None:
    one = curve(started(tuning, "one"))
    assert len(one) == STEPS
    assert one[-1] < one[0]
    # Losses of 6 are 5e-7 apart in fp32, and Adam divides by what little an expert with few tokens learns.
    assert curve(started(tuning, name)) == pytest.approx(one, abs=1e-4 if tuning == "wint" else 2e-5)


def test_with_two_data_ranks_the_second_reads_text_alone(place: Path, ranks: Ranks) -> None:
    alone = ranks.run(2, pictures_read, {}, str(place))
    assert alone[0] > 0
    assert alone[1] == 0


def pictures_read(_: dict[str, Any], place: str) -> int:
    """In one of two data ranks: media of its share of a step."""
    from erniekit.config import load
    from erniekit.data.loader import BatchLoader
    from erniekit.recipes.vision_data import vision_collate, vision_rules, vision_sources, vision_stream
    from support.seen import tokenizer

    words = ["stage=VL-SFT", f"train_dataset_path={place}/rows.jsonl", f"cache_dir={place}/cache", "packing=False"]
    words += ["random_shuffle=False", "max_seq_len=192", "max_pixels=9408", "video_max_frames=4", "video_min_frames=4"]
    cfg = load([*words, "variable_resolution=True", "dataset_num_proc=1", "media_num_proc=1"])
    rules = vision_rules(cfg, Path(place) / "model")
    sources = vision_sources(cfg, "train", tokenizer(), rules, None)
    rank = int(os.environ["RANK"])
    with vision_collate(cfg, tokenizer(), rules, 2) as collate:
        stream = vision_stream(cfg, sources, [], 1)
        loader = BatchLoader(stream, sources, 1, PACKS // 2, dp_rank=rank, dp_size=2, collate=collate)
        step = next(iter(loader))
    return sum(len(batch.vision.grids) for batch in step if batch.vision is not None)


@pytest.mark.parametrize(
    ("tuning", "name"),
    [*cases("full", full=("one", "fsdp2", "ep2", "pp2")), *cases("lora", full=("one", "tp2"))],
)
def test_a_run_that_goes_on_ends_with_the_same_bits(
    tuning: str, name: str, ranks: Ranks, place: Path, started: Callable[[str, str], Path]
) -> None:
    whole = started(tuning, name)
    mine = place / f"resumed-{tuning}-{name}"
    shutil.copytree(whole / f"checkpoint-{STEPS // 2}", mine / f"checkpoint-{STEPS // 2}")
    go(ranks, place, tuning, name, mine.name, save_steps=STEPS // 2)
    assert files(mine / f"checkpoint-{STEPS}") == files(whole / f"checkpoint-{STEPS}")
    assert files(whole / f"checkpoint-{STEPS}") != files(whole / f"checkpoint-{STEPS // 2}"), "it did train on"


@pytest.mark.full
@pytest.mark.parametrize(
    ("tuning", "source", "target"),
    [("full", "tp2", "fsdp2"), ("full", "pp2", "ep2"), ("lora", "fsdp2", "tp2")],
)
def test_a_checkpoint_comes_through_another_layout_bit_for_bit_and_the_curve_goes_on(
    tuning: str, source: str, target: str, ranks: Ranks, place: Path, started: Callable[[str, str], Path]
) -> None:
    whole, half = started(tuning, source), f"checkpoint-{STEPS // 2}"
    keys = dict(resume_from_checkpoint=whole / half, max_steps=STEPS // 2, override_resume=True)
    again = go(ranks, place, tuning, target, f"{tuning}-{source}-to-{target}", **keys)
    assert files(again / half) == files(whole / half)
    mine = place / f"on-{tuning}-{source}-{target}"
    shutil.copytree(whole / half, mine / half)
    for name in ("metrics.jsonl", RECORD):
        shutil.copyfile(whole / name, mine / name)
    go(ranks, place, tuning, target, mine.name)
    assert curve(mine) == pytest.approx(curve(started(tuning, "one")), abs=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("name", ["fsdp2", "pp2", "tp2"])
def test_whole_steps_of_text_between_the_pictures_are_the_same_in_layout(name: str, ranks: Ranks, place: Path) -> None:
    text = place / "text.jsonl"
    write_jsonl(text, [{"src": [f"say {i}"], "tgt": ["a red bar at the edge " * (1 + i % 3)]} for i in range(12)])
    keys = dict(text_dataset_path=text, modality_ratio="[1,1]", learning_rate=1e-4)
    one, many = (curve(go(ranks, place, "full", n, f"mixed-{name}-{n}", **keys)) for n in ("one", name))
    assert many == pytest.approx(one, abs=2e-5)
    records = [json.loads(line) for line in (place / f"mixed-{name}-one" / "metrics.jsonl").read_text().splitlines()]
    assert sum("loss" in record for record in records) == STEPS


@pytest.mark.full
@pytest.mark.parametrize("name", ["tp2", "pp2", "cp2", "fsdp2"])
def test_kept_features_change_no_bit_in_layout(name: str, ranks: Ranks, place: Path, tmp_path: Path) -> None:
    """Looked at in every step, looked at once and kept, and read from the cache."""
    folders = []
    for pass_, word in enumerate(("off", "on", "on")):
        more = dict(vision_feature_cache=word, save_steps=STEPS, cache_dir=tmp_path)
        folders.append(go(ranks, place, "lora", name, f"kept-{name}-{pass_}", **more))
    told = [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in folders]
    keys = ("feature_cache_made", "feature_cache_hits")
    made, hits = ([sum(record.get(key, 0) for record in each) for each in told] for key in keys)
    assert made[0] == hits[0] == made[2] == 0
    assert made[1] > 0
    assert hits[2] > 0
    for folder in folders[1:]:
        assert curve(folder) == curve(folders[0])
        assert files(folder / f"checkpoint-{STEPS}") == files(folders[0] / f"checkpoint-{STEPS}")
