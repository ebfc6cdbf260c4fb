"""LoRA with a score head: what the adapter's folder holds, who reads it, how it goes on, and what refuses it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import erniekit
from erniekit.config import load
from erniekit.data.classification import text_ids
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import CheckpointError, ConfigError
from erniekit.serve.loaded_models import find_models
from support.jsonl import write_jsonl

CLASSES = ("animal", "metal", "river")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    words = {"metal": ("copper", "iron", "gold"), "river": ("Rhine", "Nile", "Po"), "animal": ("dog", "cat", "cow")}
    rows = [{"text": f"{word} {i}", "label": name} for i in range(2) for name in words for word in words[name]]
    return write_jsonl(tmp_path / "texts.jsonl", rows)


@pytest.fixture
def classify(train: Callable, texts: Path, tmp_path: Path) -> Callable:
    """Trains adapters and a head of three classes on a tiny Llama, which transformers has as a classifier."""
    base = make_tiny_model(tmp_path / "llama", family="llama")

    def go(output: Path, **keys: object) -> Any:
        small = dict(
            stage="CLS", model_name_or_path=base, train_dataset_path=texts, fine_tuning="LoRA", lora_rank=4,
            max_steps=4, gradient_accumulation_steps=1, doctor="off", learning_rate=3e-3,
        )  # fmt: skip
        return train(output, **{**small, **keys})

    return go


def scores(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids)[:, -1]


def test_peft_reads_adapter_and_head_and_scores_alike(classify, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    classify(tmp_path / "run", max_steps=2)
    run = tmp_path / "run"
    config = json.loads((run / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["classifier", "score"])
    assert not (run / "config.json").exists()
    held = load_file(run / "adapter_model.safetensors")["base_model.model.score.weight"]
    ours, tokenizer = erniekit.load(run, dtype="fp32")
    assert ours.config.labels == CLASSES
    assert torch.equal(ours.score.weight, held)
    ids = torch.tensor([text_ids(tokenizer, "copper 7")])
    mine = scores(ours, ids)
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "llama", num_labels=3, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, run).eval()
    with torch.no_grad():
        torch.testing.assert_close(mine, theirs(ids).logits, atol=1e-5, rtol=0)
        with theirs.disable_adapter():
            assert (mine - theirs(ids).logits).abs().max() > 1e-3, "the base alone scores otherwise"


@pytest.mark.full
def test_an_evaluation_of_the_adapter_repeats_and_a_merge_gives_the_same_scores(classify, texts, tmp_path):
    from transformers import AutoModelForSequenceClassification

    classify(run := tmp_path / "run", eval_dataset_path=texts)
    ours, tokenizer = erniekit.load(run, dtype="fp32")
    ids = torch.tensor([text_ids(tokenizer, "copper 7")])
    mine = scores(ours, ids)
    at_end = json.loads((run / "eval_results.json").read_text())
    evaluate = dict(stage="CLS", eval_dataset_path=texts, max_seq_len=96, compute_type="fp32", device="cpu")
    alone = erniekit.run("eval", model_name_or_path=run, output_dir=tmp_path / "alone", **evaluate)
    assert alone.metrics["eval_loss"] == pytest.approx(at_end["eval_loss"], abs=1e-6)
    merged = erniekit.TrainingRun(run).export()
    whole = AutoModelForSequenceClassification.from_pretrained(merged, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(mine, whole(ids).logits, atol=1e-5, rtol=0)
    assert tuple(whole.config.id2label.values()) == CLASSES
    assert "AutoModelForSequenceClassification" in (merged / "README.md").read_text()


def test_an_adapter_of_peft_with_a_score_head_is_read(tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    base = make_tiny_model(tmp_path / "llama", family="llama")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3, dtype=torch.float32)
    wrapped = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj", "v_proj"]))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    wrapped.save_pretrained(tmp_path / "adapter")
    ours, tokenizer = erniekit.load(tmp_path / "adapter", dtype="fp32", base=base)
    assert ours.config.labels == ("LABEL_0", "LABEL_1", "LABEL_2"), "PEFT's files have no names"
    ids = torch.tensor([text_ids(tokenizer, "copper 7")])
    with torch.no_grad():
        torch.testing.assert_close(scores(ours, ids), wrapped.eval()(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.full
def test_head_and_adapters_resume_bit_for_bit_and_start_another_run(classify, weights, tmp_path):
    classify(tmp_path / "run", save_steps=2)
    want = weights(tmp_path / "run" / "checkpoint-4")
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    classify(tmp_path / "run", save_steps=2)
    assert weights(tmp_path / "run" / "checkpoint-4") == want
    classify(tmp_path / "more", lora_path=tmp_path / "run", max_steps=1, learning_rate=0.0)
    both = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("run", "more")]
    assert both[0].keys() == both[1].keys()
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])
    with pytest.raises(ConfigError, match=r"the adapter's score head has 3 classes .* this run 3 \(river, metal"):
        classify(tmp_path / "order", lora_path=tmp_path / "run", class_labels="river,metal,animal")
    with pytest.raises(CheckpointError, match=r"the adapter has a score head .* has no score head"):
        classify(tmp_path / "sft", stage="SFT", lora_path=tmp_path / "run")


@pytest.mark.full
def test_a_reward_model_of_adapters_learns_and_those_who_continue_texts_refuse_it(train, tiny_model, tmp_path):
    rows = [{"prompt": f"Question {i}?", "chosen": f"Good {i}.", "rejected": f"Bad {i}."} for i in range(6)]
    file = write_jsonl(tmp_path / "pairs.jsonl", rows)
    keys = dict(stage="RM", train_dataset_path=file, eval_dataset_path=file, max_steps=6, gradient_accumulation_steps=1)
    train(tmp_path / "run", **keys, fine_tuning="LoRA", lora_rank=4, learning_rate=1e-2)
    at_end = json.loads((tmp_path / "run" / "eval_results.json").read_text())
    assert at_end["eval_rewards/accuracies"] == 1.0
    with pytest.raises(CheckpointError, match="chat needs a language model"):
        find_models(load([str(tmp_path / "run")], "chat"))
    with pytest.raises(CheckpointError, match="server needs a language model"):
        find_models(load([str(tiny_model), f"lora_modules=scores={tmp_path / 'run'}"], "server"))
    with pytest.raises(CheckpointError, match="generate needs a language model"):
        erniekit.TrainingRun(tmp_path / "run").chat("copper")
    with pytest.raises(CheckpointError, match="distillation needs a language model"):
        train(tmp_path / "student", teacher_model_name_or_path=tmp_path / "run")
    with pytest.raises(CheckpointError, match="GGUF needs a language model"):
        erniekit.TrainingRun(tmp_path / "run").export(format="gguf")
    both = f"{tmp_path / 'run'},{shutil.copytree(tmp_path / 'run', tmp_path / 'copy')}"
    with pytest.raises(CheckpointError, match="cannot be merged together with others"):
        erniekit.run("export", model_name_or_path=tiny_model, lora_path=both, output_dir=tmp_path / "two")
    with pytest.raises(ConfigError, match="no place for a score head"):
        train(tmp_path / "paddle", **keys, fine_tuning="LoRA", save_format="paddle")
    (tmp_path / "run" / "score_head.json").write_text('{"id2label": {"0": "a", "1": "b"}}')
    with pytest.raises(CheckpointError, match="names 2 classes; the adapter's score head has 1"):
        erniekit.load(tmp_path / "run")
