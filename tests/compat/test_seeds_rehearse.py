"""Each seed document's job before there is a cluster: its script goes through `erniekit migrate`, is planned on the
cards that the document names, and rehearses at full size. Shrunken training of the same scripts is in
e2e/test_shrunken_recipes.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from compat.test_recipes import RECIPES, keys
from erniekit.cli.main import main
from erniekit.config import load, refuse_not_yet_supported
from erniekit.recipes.planning import raw_shape
from erniekit.recipes.shrunken import SMALL_EXPERTS, small_shape
from support.shipped import ROOT

DATA = Path(__file__).parents[1] / "data" / "migrate"
MIXED = "islands: [8xA100-80G, 8xBI150-32G]\n"
KUNLUNXIN = "examples/configs/xpu/ERNIE-4.5-300B-A47B/sft/run_sft_lora_8k.yaml"
# What is migrated -> its cluster and its ranks: a board of Iluvatar's is two devices.
SEEDS: dict[str, tuple[str, int]] = {
    "iluvatar_21b_lora.sh": ("16xBI150-32G", 16),
    "nvidia_iluvatar_21b_lora.sh": (MIXED, 16),
    "ascend_300b_sft.sh": ("8x16xAscend-64G", 128),
    "ascend_300b_lora.sh": ("16xAscend-64G", 16),
    "llama_13b_four_nodes.sh": ("4x16xBI150-32G", 64),
    KUNLUNXIN: ("16xP800-96G", 16),
}

OFTEN = ("nvidia_iluvatar_21b_lora.sh", "ascend_300b_sft.sh", "llama_13b_four_nodes.sh")


@pytest.fixture
def migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(name: str) -> str:
        monkeypatch.chdir(ROOT)
        source = DATA / name
        if name in RECIPES:  # as ERNIEKit shipped it
            source = tmp_path / "theirs.yaml"
            source.write_text(yaml.safe_dump(keys(RECIPES[name]), sort_keys=False))
        recipe = str(tmp_path / "migrated.yaml")
        assert main(["migrate", str(source), "--output", recipe]) == 0
        return recipe

    return run


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.full) for n in SEEDS])
def test_a_seeds_job_is_planned_on_its_cluster(migrated, tmp_path, capsys, name):
    recipe, (cluster, _) = migrated(name), SEEDS[name]
    refuse_not_yet_supported(load([recipe]))
    if cluster == MIXED:
        (tmp_path / "cluster.yaml").write_text(cluster)
        cluster = str(tmp_path / "cluster.yaml")
    capsys.readouterr()
    assert main(["plan", recipe, "--cluster", cluster]) == 0
    out = capsys.readouterr().out
    assert "fit" in out
    if not cluster.endswith(".yaml"):
        (own,) = [line for line in out.splitlines() if line.startswith("recipe's")]
        assert "tokens/s" in own, own  # the degrees of the script fit as they are


@pytest.mark.full
@pytest.mark.parametrize("name", SEEDS)
def test_a_seeds_job_rehearses_at_full_size(migrated, capsys, name):
    recipe, (_, ranks) = migrated(name), SEEDS[name]
    capsys.readouterr()
    assert main(["rehearse", recipe, "--ranks", str(ranks)]) == 0
    out = capsys.readouterr().out
    assert f"on {ranks} ranks" in out
    assert "all ranks' calls match, and none waits for ever" in out


WINT = "examples/configs/ERNIE-4.5-300B-A47B/sft/run_sft_wint8mix_lora_8k.yaml"


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "ranks", "rank"), [(WINT, 4, 0), ("ascend_300b_sft.sh", 128, 0), ("ascend_300b_sft.sh", 128, 127)]
)
def test_one_rank_of_a_seeds_layout_is_run_for_real(migrated, tmp_path, capsys, monkeypatch, name, ranks, rank):
    """On a CPU: its layout, precision and adapters as they are, the widths of its model small."""
    monkeypatch.chdir(ROOT)
    recipe = name if name == WINT else migrated(name)
    cfg = load([recipe])
    layers = cfg.parallel.pipeline_parallel_degree + 4
    small = {**small_shape(raw_shape(cfg)[0]), **SMALL_EXPERTS, "num_hidden_layers": layers}
    small |= dict(hidden_size=128, num_attention_heads=16, num_key_value_heads=8, head_dim=16, moe_intermediate_size=64)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**small, "moe_layer_end_index": layers - 1}))
    words = ["max_seq_len=128", f"model_name_or_path={tmp_path / 'model'}", "device=cpu"]
    capsys.readouterr()
    assert main(["rehearse", recipe, "--ranks", str(ranks), "--rank", str(rank), "--micro-batches", "2", *words]) == 0
    out = capsys.readouterr().out
    assert f"on {ranks} ranks" in out
    assert f"memory   rank {rank}:" in out
    assert "a step of 2 micro-batches" in out
