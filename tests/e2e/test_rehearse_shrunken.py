"""`erniekit rehearse RECIPE --shrunken N`: real processes train the recipe small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from erniekit.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {
    "sft": "configs/ERNIE-4.5-0.3B/sft/run_sft_lora_8k.yaml",
    "dpo": "configs/ERNIE-4.5-0.3B/dpo/run_dpo_lora_8k.yaml",
    "kto": "post-training/kto/run_kto_lora_8k.yaml",
    "reward": "post-training/reward/run_reward_8k.yaml",
    "classes": "post-training/classify/run_classify_4k.yaml",
    "distillation": "post-training/distill/run_distill_8k.yaml",
    "pre-training": "pre-training/yamls/ERNIE-4p5-21B-A3B/pretrain_8_gpus.yaml",
}


@pytest.mark.full
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_made_small_and_trains(name, capfd, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["rehearse", str(ROOT / "examples" / RECIPES[name]), "--shrunken", "2"]) == 0
    out = capfd.readouterr().out
    assert "global_step: 2" in out
    assert "next     " not in out, "the run's folder is removed"
    assert ("on 1 real rank of up to 2: the recipe's degrees are 1; --ranks 2" in out) == (name != "pre-training")
    assert "result   it trains" in out


@pytest.mark.full
@pytest.mark.parametrize(
    "words", [["data_parallel_degree=4"], ["context_parallel_degree=2"], ["--ranks", "8"]], ids=str
)
def test_every_kind_of_data_ranks_trains_small(words, capfd, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["rehearse", str(ROOT / "examples" / RECIPES["sft"]), *words, "--shrunken", "2"]) == 0
    out = capfd.readouterr().out
    assert re.search("^rehearse shrunken: 2 steps on 2 real ranks: (data|context)_parallel_degree=2$", out, re.M)
    assert "layout   2 ranks: " in out
    assert "result   it trains" in out


@pytest.mark.full
def test_a_recipe_of_several_machines_trains_small_on_this_one_whatever_a_job_script_says(capfd, monkeypatch):
    monkeypatch.chdir(ROOT)
    for name, value in {"NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "80"}.items():
        monkeypatch.setenv(name, value)
    cluster = ["nnodes=2", "node_rank=1", "master=192.0.2.2:8080", "nproc_per_node=1"]
    assert main(["rehearse", str(ROOT / "examples" / RECIPES["sft"]), *cluster, "--shrunken", "2"]) == 0
    out = capfd.readouterr().out
    assert "2 steps on 2 real ranks: data_parallel_degree=2" in out
    assert "result   it trains" in out


def test_a_layout_that_two_ranks_cannot_show_is_refused(capfd):
    recipe = ROOT / "examples/configs/ERNIE-4.5-300B-A47B/sft/run_sft_8k.yaml"
    assert main(["rehearse", str(recipe), "--shrunken", "2"]) == 2
    assert "fix:   --shrunken 4" in capfd.readouterr().err
