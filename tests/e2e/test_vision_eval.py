"""`erniekit eval` of adapters on a vision-language model: pictures are seen as in training, wherever the adapter is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

import erniekit
from erniekit.demo.tiny_vision import make_tiny_vision
from erniekit.errors import ConfigError
from support.jsonl import write_jsonl
from support.recorded import tiny_folder

PROMPT = [{"role": "user", "content": "<image>What colour?"}]
KEYS: dict[str, Any] = dict(max_seq_len=512, compute_type="fp32", device="cpu", dataset_num_proc=1, media_num_proc=1)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose pictures have at most 112 x 112 pixels, and rows with a larger one."""
    room = tmp_path_factory.mktemp("seeing")
    make_tiny_vision(room / "model")
    picture = Image.new("RGB", (600, 400), "white")
    ImageDraw.Draw(picture).rectangle([50, 50, 300, 300], fill="red")
    picture.save(room / "big.png")
    chat = {"messages": [*PROMPT, {"role": "assistant", "content": "red"}], "images": ["big.png"]}
    write_jsonl(room / "rows.jsonl", [chat] * 2)
    pair = {"messages": PROMPT, "images": ["big.png"], "chosen": "red", "rejected": "blue"}
    write_jsonl(room / "pairs.jsonl", [pair] * 2)
    return room


@pytest.fixture(scope="module")
def adapter(room: Path) -> Callable[..., Path]:
    def train(stage: str, rows: str) -> Path:
        out = room / stage
        erniekit.run(
            "train", stage=stage, model_name_or_path=room / "model", train_dataset_path=room / rows, output_dir=out,
            eval_dataset_path=room / rows, fine_tuning="LoRA", lora_rank=2, learning_rate=1e-2, max_steps=2,
            cache_dir=room / "cache", report_to="none", doctor="off", **KEYS,
        )  # fmt: skip
        return out

    return train


def evaluated(room: Path, name: str, rows: str, **keys: Any) -> dict[str, float]:
    out = room / name
    erniekit.run("eval", eval_dataset_path=room / rows, output_dir=out, cache_dir=room / "cache", **keys, **KEYS)
    return json.loads((out / "eval_results.json").read_text())


def test_an_adapters_folder_is_evaluated_with_the_sizes_of_its_base(room: Path, adapter: Callable[..., Path]) -> None:
    run = adapter("VL-SFT", "rows.jsonl")
    trained = json.loads((run / "all_results.json").read_text())["eval_loss"]
    assert json.loads((run / "preprocessor_config.json").read_text())["max_pixels"] == 112 * 112
    alone = shutil.copytree(run, room / "alone")
    (alone / "preprocessor_config.json").unlink()  # as adapters of earlier versions are
    found = evaluated(room, "of the adapter", "rows.jsonl", model_name_or_path=alone)
    assert found["eval_loss"] == pytest.approx(trained, rel=1e-6)


@pytest.mark.full
def test_pairs_with_pictures_are_evaluated_from_the_adapters_folder(room: Path, adapter: Callable[..., Path]) -> None:
    run = adapter("DPO", "pairs.jsonl")
    trained = json.loads((run / "all_results.json").read_text())
    found = evaluated(room, "of the pairs", "pairs.jsonl", model_name_or_path=run, stage="DPO")
    assert found["eval_rewards/margins"] == pytest.approx(trained["eval_rewards/margins"], rel=1e-5)


def test_a_text_model_is_refused_by_the_stage_for_pictures(room: Path, paddle: Path, tmp_path: Path) -> None:
    text = tiny_folder(paddle, tmp_path / "text")
    with pytest.raises(ConfigError, match=r"needs a vision-language model; this is a text model \(ernie4_5\)"):
        evaluated(room, "of a text model", "rows.jsonl", model_name_or_path=text, stage="VL-SFT")
