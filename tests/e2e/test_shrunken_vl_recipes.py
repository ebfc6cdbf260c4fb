"""Every VL recipe of ERNIEKit trains: its keys and kind of layout as they are, its model and its numbers tiny.

The recipe is the shipped file where there is one, else the values recorded from ERNIEKit's.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from compat.test_recipes import RECIPES, keys
from e2e.test_shrunken_recipes import ROOT, train
from erniekit.checkpoint.model_writer import write_model
from erniekit.config import load
from erniekit.models import MODELS
from erniekit.models.init import init_weights
from erniekit.recipes.shrunken import STEPS, smaller
from support.jsonl import write_jsonl
from support.ranks import Ranks
from support.seen import FOLDER, MEDIA, rows

pytestmark = pytest.mark.xdist_group("ranks")

COMMON: dict[str, Any] = dict(
    model_type="ernie4_5_moe_vl", vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024, rms_norm_eps=1e-5, rope_theta=500000.0,
    use_bias=False, freq_allocation=2, moe_num_experts=[8, 8], moe_intermediate_size=[32, 16], moe_k=3, im_patch_id=10,
    vision_config=dict(depth=2, hidden_size=32, num_heads=2, mlp_ratio=2, patch_size=14),
)  # fmt: skip
# What tells the two apart stays: shared experts, dense first layers, tied embeddings.
TINY: dict[str, dict[str, Any]] = {
    "28B-A3B": dict(moe_num_shared_experts=2, moe_layer_start_index=[1, 1], tie_word_embeddings=True),
    "424B-A47B": dict(moe_num_shared_experts=0, moe_layer_start_index=[2, 2], tie_word_embeddings=False),
}
ALL = sorted(name for name, values in RECIPES.items() if values.get("stage") == "VL-SFT")
SEEN = ("one_image", "two_images", "two_turns", "thinking", "video_lossless", "tiny", "alpha", "grey")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vl_recipes")
    spec = MODELS.get("ernie4_5_vl_moe")
    for name, kind in TINY.items():
        raw = {**COMMON, **kind}
        config = spec.read_config(raw, "paddle", not raw["tie_word_embeddings"], name)
        model = spec.build(config)
        init_weights(model, 0, 0.1)
        shutil.copytree(FOLDER / "tokenizer", folder / name)
        write_model(folder / name, config, model.state_dict().__getitem__, layout="paddle")
    shutil.copytree(MEDIA, folder / "media")
    write_jsonl(folder / "rows.jsonl", [rows()[name] for name in SEEN])
    return folder


def recipe(name: str, place: Path) -> Path:
    if (ROOT / name).is_file():
        return ROOT / name
    path = place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(keys(RECIPES[name]), sort_keys=False))
    return path


def shrunken(path: Path, place: Path, output: Path, most: int) -> tuple[int, list[str]]:
    cfg = load([str(path)])
    pp, tp = "pipeline_parallel_degree", "tensor_parallel_degree"
    degrees = smaller({name: cfg[name] for name in (pp, tp)}, most)
    model = next(name for name in TINY if name in str(cfg.model.model_name_or_path))
    values = {
        **degrees,
        "model_name_or_path": place / model,
        "train_dataset_path": place / "rows.jsonl",
        "output_dir": output,
        "cache_dir": place / "cache",
        "compute_type": cfg.precision.compute_type if cfg.lora.packed_base else "fp32",
        "max_seq_len": 256,
        "max_pixels": 9408,
        "video_min_frames": 4,
        "video_max_frames": 4,
        "max_steps": STEPS,
        "warmup_steps": 1,
        "gradient_accumulation_steps": 2,
        "device": "cpu",
        "report_to": "none",
        "dataset_num_proc": 1,
        "media_num_proc": 1,
        "prefetch_factor": 1,
    }
    return math.prod(degrees.values()), [str(path), *(f"{name}={value}" for name, value in values.items())]


def check(ranks: Ranks, name: str, place: Path, output: Path) -> None:
    count, words = shrunken(recipe(name, place), place, output, most=4)
    assert count == 4
    assert set(ranks.run(count, train, str(ROOT), words)) == {0}
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == STEPS
    assert all(math.isfinite(loss) for loss in losses)
    assert (output / f"checkpoint-{STEPS}").is_dir()


def test_there_are_eleven_of_them() -> None:
    assert len(ALL) == 11
    assert {name.split("/")[2] for name in ALL} == {"ERNIE-4.5-VL-28B-A3B", "ERNIE-4.5-VL-424B-A47B"}
    packed = [name for name in ALL if "wint" in RECIPES[name].get("compute_type", "")]
    assert [name for name in packed if (ROOT / name).is_file()] == packed
    assert len(packed) == 3


@pytest.mark.full
@pytest.mark.parametrize("name", ALL)
def test_every_shrunken_vl_recipe_trains(ranks: Ranks, place: Path, tmp_path: Path, name: str) -> None:
    check(ranks, name, place, tmp_path / "out")
