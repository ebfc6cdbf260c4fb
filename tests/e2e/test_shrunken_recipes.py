"""Every shipped recipe trains: its structure and kind of layout as they are, its model and its numbers tiny."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from erniekit.cli.main import main
from erniekit.config import load, not_yet_supported
from erniekit.demo.tiny import make_tokenizer
from erniekit.recipes.shrunken import (
    LENGTH,
    SMALL,
    SMALL_EXPERTS,
    STEPS,
    small_pre_training,
    small_run,
    write_small_model,
)
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

ROOT = Path(__file__).resolve().parents[2]
# What tells the models apart stays: shared experts, dense first layers, tied embeddings, a layer for further tokens.
TINY: dict[str, dict[str, Any]] = {
    "0.3B": dict(model_type="ernie4_5", head_dim=16, tie_word_embeddings=True),
    "21B-A3B": dict(
        SMALL_EXPERTS, model_type="ernie4_5_moe", moe_num_shared_experts=2, moe_layer_start_index=1,
        num_nextn_predict_layers=1, tie_word_embeddings=True,
    ),
    "300B-A47B": dict(
        SMALL_EXPERTS, model_type="ernie4_5_moe", moe_layer_start_index=3, num_nextn_predict_layers=1,
        tie_word_embeddings=False,
    ),
}  # fmt: skip


def recipes() -> list[Path]:
    """Those that this version trains."""
    found = [*(ROOT / "examples/configs").rglob("run_*.yaml"), *(ROOT / "examples/pre-training").rglob("*.yaml")]
    trained = [path for path in sorted(found) if path.stem not in ("run_chat", "run_eval", "run_export")]
    trained = [path for path in trained if "-VL-" not in str(path)]  # need pictures and a tower: another test's
    return [path for path in trained if not any(item.stops for item in not_yet_supported(load([str(path)])))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT / "examples").with_suffix(""))


ALL = {name_of(path): path for path in recipes()}
IN_EVERY_COMMIT = ("pre-training/yamls/ERNIE-4p5-300B-A47B/ci_ce/pretrain_8_gpus_ci",)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny models in Paddle layout, as the recipes' models are; `tokenizer` is theirs alone."""
    folder = tmp_path_factory.mktemp("models")
    for name, kind in TINY.items():
        write_small_model({**SMALL, **kind}, folder / name)
    (folder / "tokenizer").mkdir()
    make_tokenizer(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def corpus(models: Path) -> Path:
    words = ["--model_name_or_path", str(models / "tokenizer"), "--output", str(models / "corpus"), "--num_proc", "1"]
    assert main(["data", "index", str(ROOT / "examples/data/pretrain.jsonl"), *words]) == 0
    return models / "corpus"


def shrunken(path: Path, models: Path, output: Path, most: int, model: str = "") -> tuple[int, list[str]]:
    """How many ranks, and what is typed after `erniekit train`. model: of TINY; else the recipe's folder says it."""
    cfg = load([str(path)])
    count, keys = small_run(cfg, most, output, models / "cache")
    if cfg.train.stage == "PT":
        keys |= small_pre_training(cfg, keys, models / "tokenizer", models / "corpus")
    else:
        keys["max_seq_len"] = 4 * LENGTH if "/fc/" in str(path) else LENGTH
        keys["model_name_or_path"] = models / (model or path.parent.parent.name.removeprefix("ERNIE-4.5-"))
    return count, [str(path), *(f"{name}={value}" for name, value in keys.items())]


def train(folder: str, words: list[str]) -> int:
    """In a rank: the command itself, where the recipe's paths start from."""
    os.chdir(folder)
    return main(["train", *words])


def check(ranks: Ranks, path: Path, models: Path, output: Path, most: int, model: str = "", *more: str) -> None:
    count, words = shrunken(path, models, output, most, model)
    assert set(ranks.run(count, train, str(ROOT), [*words, *more])) == {0}
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == STEPS
    assert all(math.isfinite(loss) for loss in losses)
    assert (output / f"checkpoint-{STEPS}").is_dir()


@pytest.mark.parametrize("name", IN_EVERY_COMMIT)
def test_a_shrunken_recipe_trains(ranks, models, corpus, tmp_path, name):
    check(ranks, ALL[name], models, tmp_path / "out", most=4)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(ALL))
def test_every_shrunken_recipe_trains(ranks, models, corpus, tmp_path, name):
    check(ranks, ALL[name], models, tmp_path / "out", most=8)


# Launch scripts of the seed documents -> the tiny model that stands for theirs.
SCRIPTS = {
    "ascend_300b_lora": "300B-A47B",
    "ascend_300b_sft": "300B-A47B",
    "iluvatar_21b_lora": "21B-A3B",
    "llama_13b_four_nodes": "",
    "nvidia_iluvatar_21b_lora": "21B-A3B",
}


@pytest.mark.full
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_migrated_script_trains_shrunken(ranks, models, corpus, tmp_path, name):
    recipe = tmp_path / "migrated.yaml"
    assert main(["migrate", str(ROOT / f"tests/data/migrate/{name}.sh"), "--output", str(recipe)]) == 0
    cfg = load([str(recipe)])
    more = [f"{key}={ROOT / 'examples/data/sft-train.jsonl'}" for key in ("train_dataset_path", "eval_dataset_path")]
    more = [f"{word}{(',' + word.partition('=')[2]) * (len(cfg.data.train_dataset_path) - 1)}" for word in more]
    if cfg.train.stage == "PT":
        more = [f"model_name_or_path={ROOT / 'examples/pre-training/llama/llama-13b'}"]
    check(ranks, recipe, models, tmp_path / "out", 4, SCRIPTS[name], *more)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.full
def test_the_four_machines_script_trains_llama_on_one(models, corpus, tmp_path):
    """As typed: the launcher starts four ranks; then the evaluation and the final model."""
    _, words = shrunken(ALL["pre-training/llama/pretrain-llama_13b"], models, tmp_path / "out", most=4)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "NNODES": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    script = ROOT / "examples/pre-training/llama/run_node4.sh"
    started = ["bash", str(script), *words[1:], "nproc_per_node=4", f"log_dir={tmp_path / 'log'}"]
    subprocess.run(started, cwd=tmp_path, env={**env, "OMP_NUM_THREADS": "1"}, check=True, timeout=300)
    assert "eval_loss" in json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert (tmp_path / "out" / "config.json").is_file()


def test_the_list_holds_every_kind_of_recipe():
    kinds = {tuple(name.split("/")[:3]) for name in ALL}
    for model in ("ERNIE-4.5-0.3B", "ERNIE-4.5-21B-A3B", "ERNIE-4.5-300B-A47B"):
        assert {("configs", model, kind) for kind in ("sft", "dpo")} <= kinds
    assert ("configs", "ERNIE-4.5-21B-A3B", "fc") in kinds
    assert {name for name in ALL if "pre-training" in name} == {
        name_of(path) for path in (ROOT / "examples/pre-training").rglob("*.yaml")
    }
    stored = Counter(load([str(path)]).precision.compute_type for name, path in ALL.items() if "configs/" in name)
    assert (stored["wint4/8"], stored["fp8"]) == (12, 2)  # and 3 with pictures: another test's
    assert set(IN_EVERY_COMMIT) <= ALL.keys()
