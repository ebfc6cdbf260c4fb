"""A run's keys as rules for rows with pictures, and its two streams as one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.config import load
from erniekit.data.loader import BatchLoader
from erniekit.data.vision.job import VisionSource
from erniekit.data.vision.mix import ModalStream
from erniekit.devices import cpu
from erniekit.errors import ConfigError
from erniekit.parallel.mesh import World
from erniekit.recipes.datasets import TrainData
from erniekit.recipes.run_plan import RunPlan
from erniekit.recipes.vision_data import (
    beyond_patches,
    open_vision_data,
    text_sources,
    vision_collate,
    vision_rules,
    vision_sources,
    vision_stream,
)
from support.jsonl import write_jsonl
from support.seen import FOLDER, MEDIA, tokenizer


def given(*words: str):
    return load(["stage=VL-SFT", *words])


def test_keys_come_before_the_models_own_sizes_and_these_before_the_defaults(tmp_path: Path) -> None:
    assert vision_rules(given(), None).max_pixels == 28 * 28 * 1280
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"min_pixels": 784, "max_pixels": 78400, "patch_size": 14, "merge_size": 2, "temporal_conv_size": 2})
    )
    rules = vision_rules(given("video_max_pixels=9408", "video_fps=1", "render_timestamp=True"), tmp_path)
    assert (rules.min_pixels, rules.max_pixels, rules.video_min_pixels, rules.video_max_pixels) == (
        784,
        78400,
        784,
        9408,
    )
    assert rules.frames.fps == 1
    assert rules.render_timestamp
    with pytest.raises(ConfigError, match="fewest"):
        vision_rules(given("max_pixels=100"), tmp_path)


def test_erniekits_reader_turns_no_picture_and_heeds_variable_resolution() -> None:
    plain, old = given("max_pixels=9408"), given("max_pixels=9408", "compat=erniekit")
    assert vision_rules(plain, None).upright
    assert vision_rules(plain, None).max_pixels == 9408
    assert not vision_rules(old, None).upright
    assert vision_rules(old, None).max_pixels == 28 * 28 * 1280
    assert (
        vision_rules(given("max_pixels=9408", "compat=erniekit", "variable_resolution=True"), None).max_pixels == 9408
    )


def test_all_turns_are_trained_by_key() -> None:
    assert vision_rules(given(), None).template.train == "last"
    every = vision_rules(given("vision_train_turns=all"), None).template
    assert (every.train, every.block, every.train_ends) == ("all", "every", True)


@pytest.mark.parametrize("compat", ["", "erniekit"])
def test_pictures_and_text_are_read_in_turn_by_one_loader(compat: str, tmp_path: Path) -> None:
    shutil.copytree(MEDIA, tmp_path / "media")
    shutil.copy(FOLDER / "rows.jsonl", tmp_path)
    text = write_jsonl(
        tmp_path / "text.jsonl", [{"src": [f"say {i}"], "tgt": ["a red bar at the edge"]} for i in range(40)]
    )
    words = [
        f"train_dataset_path={tmp_path / 'rows.jsonl'}", f"text_dataset_path={text}", "modality_ratio=[1,1]",
        "max_seq_len=256", "max_pixels=9408", "variable_resolution=True", f"cache_dir={tmp_path / 'cache'}",
        "max_bad_fraction=1", "dataset_num_proc=1", "media_num_proc=2", f"compat={compat}",
    ]  # fmt: skip
    cfg = given(*words)
    rules = vision_rules(cfg, None)
    pictures = vision_sources(cfg, "train", tokenizer(), rules, None)
    texts = text_sources(cfg, tokenizer(), None)
    stream = vision_stream(cfg, pictures, texts, packs_per_step=2)
    assert isinstance(stream, ModalStream)
    collate = vision_collate(cfg, tokenizer(), rules, packs_at_once=1)
    loader = BatchLoader(stream, [*pictures, *texts], 1, 2, collate=collate, num_workers=1)
    try:
        steps = [step for step, _ in zip(loader, range(4))]
    finally:
        loader.close()
        collate.close()
    seen = ["".join("T" if batch.vision is None else "P" for batch in step) for step in steps]
    assert seen == (["TT", "PP"] if compat else ["PP", "TT"]) * 2
    assert all(batch.num_label_tokens for step in steps for batch in step)
    assert not collate.failed
    no_text = vision_stream(given(*words, "max_patches=500"), pictures, [], 2)
    if not compat:
        patches = [sum(int(pictures[s].patches[i]) for s, i in no_text[k]) for k in range(10)]
        assert max(patches) <= 500


def test_a_run_counts_its_steps_knows_its_media_and_evaluates_on_pictures(tmp_path: Path) -> None:
    shutil.copytree(MEDIA, tmp_path / "media")
    shutil.copy(FOLDER / "rows.jsonl", tmp_path)
    rows = tmp_path / "rows.jsonl"
    cfg = given(
        f"train_dataset_path={rows}", f"eval_dataset_path={rows}", "do_eval=True", "max_seq_len=256", "max_pixels=9408",
        "max_patches=500", f"cache_dir={tmp_path / 'cache'}", "max_bad_fraction=1", "dataset_num_proc=1",
        "media_num_proc=1", "gradient_accumulation_steps=2", "num_train_epochs=2",
    )  # fmt: skip
    plan = RunPlan(cfg, cpu.make(), World(), cast(ModelFolder, SimpleNamespace(path=tmp_path)), lora=None, mtp_tokens=0)

    def opened() -> TrainData:
        return open_vision_data(plan, tokenizer(), tmp_path)

    data = opened()
    try:
        assert data.max_steps == -(-data.stream.count_packs(2) // 2)
        batches = list(data.eval_batches(cfg))
        assert sum(batch.num_tokens for batch in batches) == sum(s.lengths.sum() for s in data.evaluation)
        assert all(len(batch.vision.patches) <= 500 for batch in batches if batch.vision is not None)
        assert data.first_batch().vision is not None
        assert (tmp_path / "bad_rows.jsonl").read_text().count("bad_picture") == 1
        before = data.fingerprints()
    finally:
        data.collate.close()
    assert opened().fingerprints() == before
    shutil.copy(MEDIA / "tiny.png", tmp_path / "media/b.png")
    assert opened().fingerprints() != before


def test_samples_beyond_the_patches_of_a_pack_are_counted() -> None:
    sources = cast(
        list[VisionSource], [SimpleNamespace(patches=np.array([16, 700])), SimpleNamespace(patches=np.array([900]))]
    )
    assert not list(beyond_patches(given(), sources))
    assert not list(beyond_patches(given("max_patches=900"), sources))
    [line] = beyond_patches(given("max_patches=500"), sources)
    assert "2 of 3 samples have more than 500 patches by themselves, up to 900" in line
