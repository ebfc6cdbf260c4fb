"""`erniekit eval`: what is evaluated, against what, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import erniekit
from erniekit.api_load import find_model
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.cli.main import main
from erniekit.config import load
from erniekit.config.rules.frozen import PACKED
from erniekit.data.collate import collate
from erniekit.data.tokenizer import load_tokenizer
from erniekit.data.types import Pack
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import CheckpointError, ConfigError, ErnieKitError
from erniekit.lora.adapter import adapter_of
from erniekit.lora.adapter_files import write_adapter
from erniekit.lora.frozen_base import on_grid
from erniekit.losses.causal import causal_loss
from erniekit.model_contract import packed_layers
from erniekit.models.layers.linear import HoldsWeight
from erniekit.recipes import stage_of
from erniekit.recipes.adapters import settings_of
from erniekit.recipes.build import build
from erniekit.recipes.evaluate import summary_of
from erniekit.recipes.run_plan import plan_run
from erniekit.track.results import write_results
from support.jsonl import write_jsonl
from support.recorded import tiny_folder
from support.sources import open_source

KEYS: dict[str, Any] = dict(max_seq_len=160, compute_type="fp32", device="cpu")


@pytest.fixture
def model(paddle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with experts, and its tokenizer."""
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    return tiny_folder(paddle, tmp_path / "model", "moe_new")


def test_a_model_with_experts_has_the_loss_of_its_rows_one_by_one(model: Path, tmp_path: Path) -> None:
    rows = [{"src": [f"Count to {n}."], "tgt": [" ".join(map(str, range(n)))]} for n in (3, 8, 5)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "out"
    metrics = erniekit.run("eval", model_name_or_path=model, eval_dataset_path=data, output_dir=out, **KEYS).metrics
    source = open_source(data, None, load_tokenizer(model), max_seq_len=160, cache_dir=tmp_path / "other")
    batches = [collate([Pack((source.sample(i),))]) for i in range(3)]
    built = ModelFolder(model).build().eval()
    total = sum(float(causal_loss(built, batch).detach()) for batch in batches)
    assert metrics["eval_tokens"] == sum(batch.num_label_tokens for batch in batches)
    assert metrics["eval_loss"] == pytest.approx(total / metrics["eval_tokens"], abs=1e-5)
    assert metrics["eval_ppl"] == pytest.approx(math.exp(metrics["eval_loss"]))
    assert json.loads((out / "eval_results.json").read_text())["eval_loss"] == metrics["eval_loss"]


@pytest.mark.parametrize("kind", ["wint8", "wint4/8"])
def test_packed_weights_have_the_loss_of_the_numbers_that_they_keep(model: Path, tmp_path: Path, kind: str) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", [{"src": ["Count to 8."], "tgt": ["0 1 2 3 4 5 6 7"]}])
    words = {"eval_dataset_path": data, **KEYS}
    packed = erniekit.run("eval", model, output_dir=tmp_path / "packed", **{**words, "compute_type": kind})
    folder, base = ModelFolder(model), PACKED[kind][0]
    built = folder.build().eval()
    with torch.no_grad():
        for name, layer in built.named_modules():
            if isinstance(layer, HoldsWeight) and name.startswith("layers."):
                layer.weight.copy_(on_grid(base, f"{name}.weight", layer.weight))
    source = open_source(data, None, load_tokenizer(model), max_seq_len=160, cache_dir=tmp_path / "other")
    batch = collate([Pack((source.sample(0),))])
    wanted = float(causal_loss(built, batch).detach()) / batch.num_label_tokens
    assert packed.metrics["eval_loss"] == pytest.approx(wanted, abs=1e-5)
    plain = erniekit.run("eval", model, output_dir=tmp_path / "plain", **words)
    assert packed.metrics["eval_loss"] != plain.metrics["eval_loss"]


def test_under_an_adapter_the_layers_are_packed_that_its_run_packed(model: Path, tmp_path: Path) -> None:
    words = ["fine_tuning=LoRA", "lora_target_modules=o_proj", "frozen_base=int8", "train_dataset_path=none"]
    cfg = load([*words, f"model_name_or_path={model}", "device=cpu"])
    trained = build(plan_run(cfg, one_process=True), stage_of(cfg)).engine.parts[0]
    adapter = adapter_of(trained, settings_of(cfg), base=str(model))
    write_adapter(tmp_path / "adapter", adapter, trained)
    evaluated = find_model(tmp_path / "adapter").build(torch.float32, packed="int8")
    adapted = [f"layers.{n}.attn.out.base" for n in range(ModelFolder(model).config.num_layers)]
    assert [*packed_layers(evaluated)] == [*packed_layers(trained)] == adapted


def test_pairs_are_compared_with_a_model_that_must_be_named(model: Path, tmp_path: Path) -> None:
    pair = {"src": ["Name a bird."], "tgt": [], "response": [["A swallow."], ["A trout."]], "sort": [1, 0]}
    keys = dict(KEYS, stage="DPO", eval_dataset_path=write_jsonl(tmp_path / "pairs.jsonl", [pair]))
    with pytest.raises(ConfigError, match="model_name_or_path"):
        erniekit.run("eval", output_dir=model, **keys)  # a result without what it was trained from
    itself = erniekit.run("eval", output_dir=model, model_name_or_path=model, **keys).metrics
    assert itself["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert itself["eval_rewards/margins"] == 0
    free = erniekit.run("eval", output_dir=model, reference_free=True, **keys).metrics
    assert free["eval_rewards/margins"] == pytest.approx(
        0.1 * (free["eval_logps/chosen"] - free["eval_logps/rejected"])
    )


def test_the_last_line_says_what_the_stage_is_about() -> None:
    pairs = {"eval_loss": 0.5, "eval_pairs": 40.0, "eval_rewards/accuracies": 0.75, "eval_rewards/margins": 0.25}
    assert summary_of(pairs) == "eval_loss 0.5000, 75.0% of 40 pairs preferred right, reward margin 0.25"
    assert summary_of({"eval_loss": 0.5, "eval_ppl": 1.65, "eval_tokens": 1200.0}).endswith(
        "eval_ppl 1.65 on 1,200 tokens"
    )


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "eval_results.json").read_text())


def test_evaluations_without_output_dir_go_to_a_new_folder_each(model, tmp_path, monkeypatch, capsys):
    """A run in ./output is neither evaluated instead of the model that is named, nor written to."""
    monkeypatch.chdir(tmp_path)
    data = write_jsonl(tmp_path / "rows.jsonl", [{"src": ["Hello."], "tgt": ["Good day."]}])
    mine, other = (shutil.copytree(model, tmp_path / name) for name in ("mine", "other/export"))
    shutil.copytree(model, tmp_path / "output")
    before = sorted(path.name for path in Path("output").iterdir())
    for folder in (mine, other, mine):
        words = [f"model_name_or_path={folder}", f"eval_dataset_path={data}", *(f"{k}={v}" for k, v in KEYS.items())]
        assert main(["eval", *words]) == 0
        assert f"model    {folder}\n" in capsys.readouterr().out
    places = sorted(str(path) for path in Path("eval").iterdir())
    assert places == ["eval/mine-1", "eval/mine-2", "eval/other-export-1"]
    assert results(Path("eval/other-export-1"))["eval_model"] == str(other)
    assert sorted(path.name for path in Path("output").iterdir()) == before


def test_generation_is_said_to_have_no_effect(model, tmp_path, capsys):
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"src": ["Hello"], "tgt": ["Good day"]}])
    keys = dict(KEYS, eval_dataset_path=str(rows), output_dir=str(tmp_path / "out"))
    erniekit.run("eval", str(model), eval_generate=2, **keys)
    assert "eval_generate: without effect here" in capsys.readouterr().out


def test_an_evaluation_that_fails_leaves_no_folder(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ErnieKitError):
        erniekit.run("eval", model_name_or_path=model, eval_dataset_path="nope.jsonl", **KEYS)
    assert list(Path("eval").iterdir()) == []


def test_another_models_results_are_replaced_only_when_told(model, tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", [{"src": ["Hello."], "tgt": ["Good day."]}])
    other, out = shutil.copytree(model, tmp_path / "other"), tmp_path / "out"
    keys = dict(KEYS, eval_dataset_path=data, output_dir=out)
    for _ in range(2):  # the same model again is what output_dir was named for
        erniekit.run("eval", model_name_or_path=model, **keys)
    held = (out / "eval_results.json").read_bytes()
    with pytest.raises(ConfigError, match="another model") as error:
        erniekit.run("eval", model_name_or_path=other, **keys)
    assert "overwrite_output_dir" in error.value.fix
    assert (out / "eval_results.json").read_bytes() == held
    erniekit.run("eval", model_name_or_path=other, overwrite_output_dir=True, **keys)
    assert results(out)["eval_model"] == str(other)


def test_a_runs_own_results_are_not_replaced_by_those_of_a_model_that_is_typed(model, tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", [{"src": ["Hello."], "tgt": ["Good day."]}])
    run, other = shutil.copytree(model, tmp_path / "run"), shutil.copytree(model, tmp_path / "other")
    write_results(run, train={"train_loss": 2.0}, evaluation={"eval_loss": 1.5})  # as a training does
    keys = dict(KEYS, eval_dataset_path=data, output_dir=run)
    with pytest.raises(ConfigError, match="another model"):
        erniekit.run("eval", other, **keys)
    assert results(run) == {"eval_loss": 1.5}
    erniekit.run("eval", **keys)
    assert results(run)["eval_model"] == str(run)


def test_a_users_file_of_the_results_name_is_refused_before_anything_is_evaluated(model, tmp_path, capsys):
    data, out = write_jsonl(tmp_path / "rows.jsonl", [{"src": ["Hello."], "tgt": ["Good day."]}]), tmp_path / "out"
    out.mkdir()
    (out / "all_results.json").write_text("mine")
    with pytest.raises(ErnieKitError, match="not written by erniekit"):
        erniekit.run("eval", model_name_or_path=model, eval_dataset_path=data, output_dir=out, **KEYS)
    assert "eval  " not in capsys.readouterr().out
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("all_results.json", "mine")]


def test_the_tokenizer_that_is_named_is_the_one_evaluated_with(model, tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", [{"src": ["Hello."], "tgt": ["Good day."]}])
    keys = dict(KEYS, eval_dataset_path=data, output_dir=tmp_path / "out")
    bare = shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("*token*"))
    with pytest.raises(CheckpointError, match="without a tokenizer"):
        erniekit.run("eval", model_name_or_path=bare, **keys)
    told = erniekit.run("eval", model_name_or_path=bare, tokenizer_name=model, **keys).metrics
    assert told["eval_tokens"] > 0


def test_a_model_that_gives_no_numbers_has_no_results(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = write_jsonl(tmp_path / "rows.jsonl", [{"src": ["Hello."], "tgt": ["Good day."]}])
    model = make_tiny_model(tmp_path / "tiny")
    weights = model / "model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if "norm" in name)
    tensors[name][:] = float("nan")
    save_file(tensors, weights, {"format": "pt"})
    assert main(["eval", str(model), f"eval_dataset_path={data}", *(f"{k}={v}" for k, v in KEYS.items())]) == 3
    said = capsys.readouterr()
    assert said.err.startswith(f"error: the loss of this model is not a number: nan\nwhere: {model}\nfix: ")
    assert "done" not in said.out
    assert not list(tmp_path.rglob("*results.json"))


@pytest.mark.parametrize(("made", "what"), [(False, "there is no nothere"), (True, "nothere holds no model")])
def test_an_output_dir_without_a_run_is_named(tmp_path, monkeypatch, capsys, made, what):
    monkeypatch.chdir(tmp_path)
    if made:
        (tmp_path / "nothere").mkdir()
    data = write_jsonl(tmp_path / "rows.jsonl", [{"src": ["Hello."], "tgt": ["Good day."]}])
    assert main(["eval", "--output_dir", "nothere", "--eval_dataset_path", str(data)]) == 2
    said = capsys.readouterr().err
    assert what in said
    assert "where: output_dir: flag --output_dir" in said
    assert "model_name_or_path=DIR" in said


def test_into_a_runs_folder_go_the_results_and_the_rows_that_cannot_be_used(model, tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", [{"src": ["Hello."], "tgt": ["Good day."]}, {"src": 5}])
    before = {path.name for path in model.iterdir()}
    erniekit.run("eval", output_dir=model, eval_dataset_path=data, max_bad_fraction=0.9, **KEYS)
    added = {path.name for path in model.iterdir()} - before - {".erniekit-files"}
    assert added == {"eval_results.json", "all_results.json", "bad_eval_rows.jsonl"}
    page = (
        (Path(__file__).parents[3] / "docs" / "eval.md")
        .read_text()
        .split("Into the folder of a run")[1]
        .split(".\n")[0]
    )
    assert all(f"`{name}`" in page for name in added)
