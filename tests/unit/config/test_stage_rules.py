"""What follows from `stage: DPO` and its loss, and from adapters, before anything is read."""

from __future__ import annotations

import pytest

from erniekit.config import load
from erniekit.config.not_yet_supported import not_yet_supported
from erniekit.errors import ConfigError


def note(cfg, key):
    return next((n for n in cfg.notes if n.key == key), None)


def test_attention_dropout_of_a_preference_recipe_is_off_and_says_why():
    cfg = load(["stage=DPO", "attention_probs_dropout_prob=0.1", "dropout_warmup_steps=100"])
    assert cfg.model.attention_probs_dropout_prob == 0
    assert cfg.model.dropout_warmup_steps == 0
    assert "one network" in note(cfg, "attention_probs_dropout_prob").reason
    assert not_yet_supported(cfg) == []


def test_every_preference_recipe_asks_for_dropout_and_none_is_stopped(root):
    recipes = sorted((root / "examples" / "configs").glob("*/dpo/*.yaml"))
    assert len(recipes) == 20
    for recipe in recipes:
        cfg = load([str(recipe)])
        assert note(cfg, "attention_probs_dropout_prob").old == 0.1
        assert not any(item.stops for item in not_yet_supported(cfg))


def test_other_dropout_of_a_preference_recipe_is_refused():
    (item,) = not_yet_supported(load(["stage=DPO", "hidden_dropout_prob=0.1"]))
    assert item.stops


@pytest.mark.parametrize("words", [["loss_type=simpo"], ["reference_free=True"], ["fine_tuning=LoRA"]])
def test_a_reference_that_is_no_second_model_is_not_updated(words):
    cfg = load(["stage=DPO", "fine_tuning=Full", "ref_model_update_steps=10", *words])
    assert cfg.dpo.ref_model_update_steps == -1
    assert note(cfg, "ref_model_update_steps").reason


@pytest.mark.parametrize("words", [["stage=DPO", "loss_type=ipo"], ["stage=DPO"], ["stage=KTO"]])
def test_a_beta_of_zero_which_trains_nothing_is_refused(words):
    with pytest.raises(ConfigError, match="beta is 0, with which"):
        load([*words, "beta=0"], "train")
    load([*words, "beta=0.01"], "train")
    load(["stage=DPO", "loss_type=or", "beta=0"], "train")  # does not use it


def test_a_second_model_is_updated_as_asked():
    assert load(["stage=DPO", "fine_tuning=Full", "ref_model_update_steps=10"]).dpo.ref_model_update_steps == 10


def test_kept_log_probabilities_of_a_reference_that_changes_are_refused():
    with pytest.raises(ConfigError, match="cached keeps one reference"):
        load(["stage=DPO", "fine_tuning=Full", "ref_model_update_steps=10", "reference_logps=cached"])


@pytest.mark.parametrize("words", [["stage=DPO", "dpo_benchmark=True"], ["stage=SFT", "sft_benchmark=True"]])
def test_a_benchmark_neither_evaluates_nor_saves_on_the_way(words):
    cfg = load([*words, "eval_dataset_path=a.jsonl", "evaluation_strategy=epoch", "save_strategy=steps"])
    assert (cfg.train.evaluation_strategy, cfg.train.do_eval, cfg.checkpoint.save_strategy) == ("no", False, "no")


@pytest.mark.parametrize(
    ("command", "words", "what"),
    [
        ("train", ["fine_tuning=Full"], "Full trains no adapters"),
        ("doctor", ["fine_tuning=Full"], "Full trains no adapters"),
        ("train", ["fine_tuning=LoRA", "lora_path=a,b"], "train takes one adapter"),
        ("eval", ["lora_path=a,b"], "eval takes one adapter"),
        ("server", ["lora_path=a,b"], "server takes one adapter"),
        ("split", [], "merges no adapters"),
        ("export", [], "output_dir is missing: where"),
        ("export", ["lora_path=a,a", "output_dir=out"], "names an adapter twice"),
    ],
)
def test_an_adapter_that_a_command_would_leave_out_is_refused(command, words, what):
    with pytest.raises(ConfigError, match=what) as error:
        load(["lora_path=a", *words], command)
    assert "lora_path" in error.value.where
    assert error.value.fix


def test_one_adapter_is_taken_where_it_is_used():
    for command in ("train", "eval", "chat", "server", "config"):
        assert load(["fine_tuning=LoRA", "lora_path=some folder/a"], command).lora.lora_path == ("some folder/a",)


def test_fewest_frames_above_most_are_refused_and_a_missing_limit_is_none():
    with pytest.raises(ConfigError, match="video_min_frames is 30, video_max_frames 10"):
        load(["stage=VL-SFT", "video_min_frames=30", "video_max_frames=10"])
    load(["stage=VL-SFT", "video_min_frames=30", "video_max_frames=-1"])


def test_a_share_of_text_steps_without_text_says_that_it_does_nothing():
    assert "no text_dataset_path" in note(load(["stage=VL-SFT", "modality_ratio=[1,1]"]), "modality_ratio").reason
    assert note(load(["stage=VL-SFT", "modality_ratio=[1,1]", "text_dataset_path=a.jsonl"]), "modality_ratio") is None


def test_an_evaluation_file_of_pictures_is_evaluated_at_the_end():
    assert load(["stage=VL-SFT", "eval_dataset_path=a.jsonl"]).train.do_eval
