"""Islands that cannot be are refused by `plan`, `rehearse` and `train` alike: what, where, what to do, exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.cli.main import main
from erniekit.recipes import rehearsed_ranks

SHAPE = dict(
    model_type="ernie4_5", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=True,
    max_position_embeddings=128,
)  # fmt: skip
LAYOUT = dict(tensor_parallel_degree=2, pipeline_parallel_degree=2, max_seq_len=32, gradient_accumulation_steps=2)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "rows.jsonl").write_text('{"src": ["q"], "tgt": ["a"]}\n')
    rows = str(tmp_path / "rows.jsonl")
    keys = dict(LAYOUT, model_name_or_path=str(tmp_path), train_dataset_path=rows, device="cpu")
    (tmp_path / "run.yaml").write_text("".join(f"{key}: {value}\n" for key, value in keys.items()))
    return tmp_path / "run.yaml"


def refused(words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    lines = capfd.readouterr().err.strip().splitlines()[-3:]
    assert [line.split(":")[0] for line in lines] == ["error", "where", "fix"]
    assert all(line.partition(":")[2].strip() for line in lines)
    return "\n".join(lines)


COMMANDS = {"plan": ["--cluster", "4x24G"], "rehearse": [], "train": ["nproc_per_node=4"]}
ISLANDS = {
    "[gpu:2,acme:2]": "no device 'acme'",
    "[gpu:4]": "names one kind of device",
    "[gpu:2,npu:0]": "'npu:0' is not an island",
    "[gpu:2,npu]": "'npu' is not an island",
    "[gpu:2:1:80,npu:2]": "is not an island",  # a memory without its unit
    "[gpu:2:1:0G,npu:2]": "is not an island",
    "[gpu:1,npu:1,cpu:2]": "names 3 kinds of device, and pipeline_parallel_degree is 2",
    "[gpu:2,npu:1]": "ranks",  # 3 ranks where the layout has 4
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("islands", ISLANDS)
def test_a_recipe_with_wrong_islands_is_refused(
    command: str, islands: str, recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(recipe.read_text() + f"islands: {json.dumps(islands)}\n")
    assert ISLANDS[islands] in refused([command, str(recipe), *COMMANDS[command]], capfd)


def test_a_stage_across_two_islands_is_refused_before_there_are_any(
    recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = refused(["rehearse", str(recipe), "islands=[gpu:1,npu:3]"], capfd)
    assert "pipeline stage 0 would be on gpu and npu (ranks 0 to 1)" in said


def test_islands_that_fit_are_rehearsed(
    recipe: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsed_ranks, "STARTS", dict.fromkeys(("fork", "spawn"), float("inf")))  # in this process
    assert main(["rehearse", str(recipe), "islands=[gpu:2,npu:2]"]) == 0
    assert "all ranks' calls match" in capfd.readouterr().out


CLUSTERS = {
    "islands: [{card: H100-80G}, {card: Zorn-32G}]": "no data sheet of a card 'Zorn'",
    "islands: [{card: H100-80G}, {devices: 8}]": "an island has a card",
    "islands: [{card: H100-80G}, {card: BI150, memory_gib: none}]": "memory_gib is 'none'",
    "islands: [{card: H100-80G}, {card: BI150, memory_gib: 0}]": "memory_gib is 0",
    "islands: [{card: H100-80G}, {card: BI150, devices: 2.5}]": "devices is 2.5",
    "islands: [{card: H100-80G}, {card: BI150, vendor: acme}]": "unknown 'vendor'",
    "islands: [8x80G, 8xBI150-32G]\nbetween: 12": "unknown 'between'",
    "islands: [8x80G, 8xBI150-32G]\nbetween_gb: -1": "between_gb is -1",
    "islands: {card: H100}": "it lists no islands",
    "islands: []": "it lists no islands",
    "islands: [8x80G,\n  : : bad": "not a YAML file",
}


@pytest.mark.parametrize("text", CLUSTERS)
def test_a_cluster_file_with_wrong_islands_is_refused(
    text: str, recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = recipe.parent / "cluster.yaml"
    file.write_text(text)
    said = refused(["plan", str(recipe), "--cluster", str(file)], capfd)
    assert CLUSTERS[text] in said
    assert str(file) in said


def test_a_recipe_is_planned_on_the_islands_it_names(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(recipe), "islands=[gpu:2,npu:2]", "--cluster"]
    assert "islands names 2 + 2 ranks" in refused([*words, "4x24G"], capfd)
    file = recipe.parent / "cluster.yaml"
    file.write_text("islands: [2x24G, 2xAscend-64G]\n")
    assert main([*words, str(file)]) == 0
