"""Reward models and classifiers as a user trains them: what is saved, who reads it, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import erniekit
from erniekit.config.metrics import metrics_of
from erniekit.data.classification import text_ids
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import CheckpointError, ConfigError, DataError
from support.jsonl import write_jsonl

CLASSES = ("animal", "metal", "river")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    words = {"metal": ("copper", "iron", "gold"), "river": ("Rhine", "Nile", "Po"), "animal": ("dog", "cat", "cow")}
    rows = [{"text": f"{word} {i}", "label": name} for i in range(2) for name in words for word in words[name]]
    return write_jsonl(tmp_path / "texts.jsonl", rows)


@pytest.fixture
def classify(train: Callable, texts: Path) -> Callable:
    def go(output: Path, **keys: object) -> Any:
        small = dict(stage="CLS", train_dataset_path=texts, max_steps=4, gradient_accumulation_steps=1, doctor="off")
        return train(output, **{**small, **keys})

    return go


def test_a_classifier_is_a_folder_that_eval_load_and_transformers_read(classify, texts, tmp_path):
    from transformers import AutoModelForSequenceClassification

    base = make_tiny_model(tmp_path / "llama", family="llama")
    keys = dict(model_name_or_path=base, eval_dataset_path=texts, doctor="on", learning_rate=3e-3, max_steps=8)
    classify(tmp_path / "run", **keys)
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForSequenceClassification"]
    assert written["id2label"] == {str(i): name for i, name in enumerate(CLASSES)}
    assert written["label2id"]["river"] == 2
    at_end = json.loads((tmp_path / "run" / "eval_results.json").read_text())
    told = {name.removeprefix("eval_") for name in at_end if name.startswith("eval_")}
    assert told - {"rows", "runtime", "samples_per_second", "steps_per_second", "model"} == set(metrics_of("CLS", ""))
    alone = erniekit.run(
        "eval", model_name_or_path=tmp_path / "run", stage="CLS", eval_dataset_path=texts, max_seq_len=96,
        compute_type="fp32", output_dir=tmp_path / "alone", device="cpu",
    )  # fmt: skip
    assert alone.metrics["eval_loss"] == pytest.approx(at_end["eval_loss"], abs=1e-6)
    assert alone.metrics["eval_accuracy"] == at_end["eval_accuracy"] > 0.5
    ours, tokenizer = erniekit.load(tmp_path / "run", dtype="fp32")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run", dtype=torch.float32).eval()
    ids = torch.tensor([text_ids(tokenizer, "copper 7")])
    with torch.no_grad():
        mine, other = ours(ids)[:, -1], theirs(ids).logits
    torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)
    assert ours.config.labels == tuple(theirs.config.id2label.values()) == CLASSES


@pytest.mark.full
def test_a_classifier_resumes_bit_for_bit_and_goes_on_from_its_own_head(classify, weights, tmp_path):
    classify(tmp_path / "run", save_steps=2)
    want = weights(tmp_path / "run" / "checkpoint-4")
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    classify(tmp_path / "run", save_steps=2)
    assert weights(tmp_path / "run" / "checkpoint-4") == want
    classify(tmp_path / "more", model_name_or_path=tmp_path / "run", max_steps=1, learning_rate=0.0)
    assert torch.equal(*(erniekit.load(tmp_path / name)[0].score.weight for name in ("run", "more")))


def test_a_reward_model_learns_pairs_with_margins_and_is_evaluated(train, tmp_path):
    rows = [
        {"prompt": f"Question {i}?", "chosen": f"Good answer {i}.", "rejected": f"Bad {i}.", "margin": 0.5}
        for i in range(6)
    ]
    file = write_jsonl(tmp_path / "pairs.jsonl", rows)
    keys = dict(stage="RM", train_dataset_path=file, eval_dataset_path=file, max_steps=6, gradient_accumulation_steps=1)
    train(tmp_path / "run", **keys, reward_margin=1.0, center_rewards_coefficient=0.01, learning_rate=3e-3)
    at_end = json.loads((tmp_path / "run" / "eval_results.json").read_text())
    assert at_end["eval_rewards/accuracies"] == 1.0
    assert at_end["eval_pairs"] == 6
    told = {name.removeprefix("eval_") for name in at_end if name.startswith("eval_")}
    assert told - {"pairs", "runtime", "samples_per_second", "steps_per_second", "model"} == set(metrics_of("RM", ""))
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["architectures"][0].endswith("ForSequenceClassification")
    assert written["id2label"] == {"0": "LABEL_0"}


def test_what_cannot_be_is_refused_by_name(classify, train, texts, tmp_path):
    with pytest.raises(ConfigError, match="ERNIEKit's adapter files have no place for a score head"):
        classify(tmp_path / "a", fine_tuning="LoRA", save_format="paddle")
    with pytest.raises(ConfigError, match="runs with data parallelism and sharding; pipeline_parallel_degree is 2"):
        classify(tmp_path / "b", pipeline_parallel_degree=2)
    one = write_jsonl(tmp_path / "one.jsonl", [{"text": "a", "label": "x"}, {"text": "b", "label": "x"}])
    with pytest.raises(ConfigError, match="two classes or more, each once; found: x"):
        classify(tmp_path / "c", train_dataset_path=one)
    with pytest.raises(DataError, match="`label` is 'river'; the classes are metal, animal"):
        classify(tmp_path / "d", class_labels="metal,animal")
    with pytest.raises(DataError, match="hold no preference pairs"):
        train(tmp_path / "e", stage="RM")
    classify(tmp_path / "run", max_steps=1)
    with pytest.raises(CheckpointError, match="stage SFT needs a language model"):
        train(tmp_path / "f", model_name_or_path=tmp_path / "run")
    with pytest.raises(CheckpointError, match="generate needs a language model"):
        erniekit.load(tmp_path / "run").chat("copper")
    with pytest.raises(CheckpointError, match="GGUF needs a language model"):
        erniekit.TrainingRun(tmp_path / "run").export(format="gguf")
    with pytest.raises(ConfigError, match="has a score head; stage is SFT"):
        erniekit.run("eval", model_name_or_path=tmp_path / "run", eval_dataset_path=texts, device="cpu")
    assert not any((tmp_path / name).exists() for name in "abc"), "nothing is left behind"
