"""What follows from `stage: PT`, from the files that mean it, and from the forms its recipes come in."""

from __future__ import annotations

import pytest

from erniekit.config import for_world, load
from erniekit.errors import ConfigError


@pytest.mark.parametrize("word", ["input_dir=corpus", "data_filelist=a,b", "dataset_type=pretrain", "stage=PT"])
def test_pre_training_data_means_pre_training_of_every_weight(word):
    cfg = load([word])
    assert (cfg.train.stage, cfg.lora.fine_tuning, cfg.lora.lora) == ("PT", "Full", False)


def test_adapters_are_trained_where_they_are_asked_for():
    assert load(["stage=PT", "fine_tuning=LoRA"]).lora.lora


def test_pre_training_files_in_another_stage_are_refused():
    with pytest.raises(ConfigError, match="dataset_type is pretrain, stage is SFT"):
        load(["stage=SFT", "dataset_type=pretrain"])


def test_from_scratch_means_no_weights_in_pre_training_alone():
    assert not load(["stage=PT", "from_scratch=1"]).model.continue_training
    assert load(["stage=PT", "from_scratch=0"]).model.continue_training
    assert load(["stage=PT", "from_scratch=1", "continue_training=True"]).model.continue_training  # said later
    assert load(["stage=VL-SFT", "from_scratch=1"]).model.continue_training


def test_documents_see_each_other_in_erniekits_way_only():
    assert not load(["stage=PT"]).model.use_global_causal_attn
    assert load(["stage=PT", "compat=erniekit"]).model.use_global_causal_attn
    assert not load(["stage=PT", "compat=erniekit", "use_global_causal_attn=0"]).model.use_global_causal_attn
    assert not load(["compat=erniekit"]).model.use_global_causal_attn


def test_a_global_batch_wins_over_the_accumulation_of_some_cluster():
    cfg = load(["stage=PT", "global_batch_size=128", "gradient_accumulation_steps=8", "batch_size=2"])
    for ranks in (1, 2, 8):
        run = for_world(cfg, ranks).train
        assert run.gradient_accumulation_steps * 2 * ranks == run.global_batch_size == 128
    other = for_world(load(["global_batch_size=128", "gradient_accumulation_steps=8", "batch_size=2"]), 2).train
    assert (other.gradient_accumulation_steps, other.global_batch_size) == (8, 32)  # fine-tuning: as before


def test_steps_to_evaluate_after_are_kept_to():
    assert load(["stage=PT", "do_eval=1", "eval_steps=5"]).train.evaluation_strategy == "steps"
    assert load(["stage=PT", "eval_steps=5"]).train.evaluation_strategy == "no"
    assert load(["stage=PT", "eval_iters=10"]).train.max_evaluate_steps == 10


def test_files_and_dotted_words_change_parts_of_a_mapping(tmp_path):
    for name, text in (("a", "{x: 1, y: {z: 2, w: 3}}"), ("b", "{y: {z: 4}}")):
        (tmp_path / f"{name}.yaml").write_text(f"model_args:\n  model_config: {text}\n")
    words = [
        "--configs",
        str(tmp_path / "a.yaml"),
        str(tmp_path / "b.yaml"),
        "--kwargs",
        "model_args.model_config.y.w=5",
    ]
    assert load(words).model.model_config == {"x": 1, "y": {"z": 4, "w": 5}}
