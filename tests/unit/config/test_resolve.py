"""What follows from what: each rule by its effect, its note and its silence when it has nothing to say."""

from __future__ import annotations

import pytest

from erniekit.config import load
from erniekit.errors import ConfigError


def note(cfg, key):
    return next((n for n in cfg.notes if n.key == key), None)


@pytest.fixture
def full(tmp_path):
    path = tmp_path / "full.yaml"
    path.write_text("fine_tuning: Full\nlora: true\nbatch_size: 1\nper_device_train_batch_size: 4\n")
    return str(path)


def test_fine_tuning_alone_decides_lora_within_one_file_and_says_so(full):
    cfg = load([full])
    assert not cfg.lora.lora
    assert str(note(cfg, "lora")) == "lora: True -> False (fine_tuning is Full)"


def test_lora_on_the_command_line_means_fine_tuning_lora(full):
    cfg = load([full, "lora=True"])
    assert cfg.lora.lora
    assert cfg.lora.fine_tuning == "LoRA"


def test_script_words_before_lora_do_not_undo_it():
    assert load(["fine_tuning=Full", "--lora"]).lora.lora
    assert not load(["fine_tuning=Full"]).lora.lora


def test_lora_alpha_follows_rank_and_rslora():
    assert load(["lora_rank=32"]).lora.lora_alpha == 64
    assert load(["--rslora"]).lora.lora_alpha == 4
    assert load(["lora_alpha=7"]).lora.lora_alpha == 7
    plus = load(["--rslora_plus"]).lora
    assert (plus.rslora, plus.lora_plus_scale, plus.lora_alpha) == (True, 4.0, 4)


@pytest.mark.parametrize(
    ("words", "compute"),
    [
        ([], "bf16"),
        (["--bf16"], "bf16"),
        (["--bf16", "False"], "fp32"),
        (["compute_type=fp32", "--bf16"], "bf16"),
        (["--fp16"], "fp16"),
        (["weight_quantize_algo=weight_only_mix"], "wint4/8"),
        (["compute_type=bf16"], "bf16"),
    ],
)
def test_script_flags_and_compute_type_agree(words, compute):
    cfg = load(words)
    assert cfg.precision.compute_type == compute
    assert cfg.precision.bf16 is (compute in ("bf16", "wint4/8"))


def test_bf16_and_fp16_together_are_refused():
    with pytest.raises(ConfigError, match="both on"):
        load(["--bf16", "--fp16"])


def test_fp8_implies_its_keys_and_says_each():
    cfg = load(["compute_type=fp8"])
    assert cfg.quant.weight_quantize_algo == "fp8linear"
    assert cfg.optim.use_lowprecision_moment
    assert cfg.memory.tensorwise_offload_optimizer
    assert not cfg.quant.apply_hadamard
    for key in ("apply_hadamard", "use_lowprecision_moment", "tensorwise_offload_optimizer"):
        assert note(cfg, key).reason.startswith("compute_type is fp8")
        assert not note(cfg, key).quiet


def test_what_fp8_implies_can_be_overruled():
    words = ["use_lowprecision_moment=False", "tensorwise_offload_optimizer=False", "apply_hadamard=True"]
    cfg = load(["compute_type=fp8", *words])
    assert not cfg.optim.use_lowprecision_moment
    assert not cfg.memory.tensorwise_offload_optimizer
    assert cfg.quant.apply_hadamard
    assert load(["compute_type=fp8", "optim=adamw_custom"]).optim.optim == "adamw"
    assert load(["compute_type=fp8", "compat=erniekit"]).quant.apply_hadamard


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["compute_type=fp8", "use_fp8=True"], "static scales"),
        (["compute_type=fp8", "fine_tuning=LoRA", "frozen_base=fp8"], "both set how the base computes"),
        (["use_fp8=True", "fine_tuning=LoRA", "frozen_base=fp8"], "both set how the base computes"),
        (["compute_type=fp8", "hadamard_block_size=48"], "no power of two"),
        (
            ["compute_type=fp8", "stage=DPO", "fine_tuning=Full", "ref_model_update_steps=5"],
            "a reference that becomes the policy",
        ),
    ],
)
def test_what_fp8_cannot_do_is_refused(words, what):
    with pytest.raises(ConfigError, match=what) as e:
        load(words)
    assert e.value.fix


def test_batch_size_of_the_file_overrides_per_device_and_says_so(full):
    cfg = load([full])
    assert cfg.train.per_device_train_batch_size == 1
    assert not note(cfg, "per_device_train_batch_size").quiet


def test_per_device_batch_sizes_of_a_script_count():
    cfg = load(["--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "3"])
    assert (cfg.train.batch_size, cfg.train.per_device_eval_batch_size) == (2, 3)


def test_global_batch_size_gives_the_accumulation():
    cfg = load(["global_batch_size=32", "batch_size=4"])
    assert cfg.train.gradient_accumulation_steps == 8
    spread = load(["global_batch_size=32", "batch_size=4", "data_parallel_degree=2", "sharding_parallel_degree=2"])
    assert spread.train.gradient_accumulation_steps == 2
    with pytest.raises(ConfigError, match="multiple"):
        load(["global_batch_size=30", "batch_size=4"])


def test_global_batch_size_follows_the_rest():
    words = ["batch_size=2", "gradient_accumulation_steps=8"]
    assert load(words).train.global_batch_size == 16
    assert load([*words, "sharding=stage1"]).train.global_batch_size == 16  # as far as is known


def test_warmup_longer_than_the_run_is_remarked_upon():
    cfg = load(["warmup_steps=2000", "max_steps=200"])
    assert "10% of learning_rate" in note(cfg, "warmup_steps").reason
    assert note(load(["warmup_steps=20", "max_steps=200"]), "warmup_steps") is None


def test_a_run_of_no_steps_is_refused_and_max_steps_0_is_said_to_be_minus_1():
    with pytest.raises(ConfigError, match="nothing would be trained"):
        load(["num_train_epochs=0"], "train")
    assert "without effect" in note(load(["max_steps=0"], "train"), "max_steps").reason
    assert note(load(["max_steps=5", "num_train_epochs=0"], "train"), "max_steps") is None


def test_the_second_schedule_name_counts_when_the_first_is_not_given():
    cfg = load(["lr_scheduler=cosine"])
    assert cfg.optim.lr_scheduler_type == "cosine"
    assert load(["lr_scheduler=cosine", "lr_scheduler_type=linear"]).optim.lr_scheduler_type == "linear"
    assert load(["lr_scheduler=cosine", "compat=erniekit"]).optim.lr_scheduler_type == "linear"
    assert load(["lr_scheduler=wsd:500"]).optim.lr_scheduler_type == "wsd"


@pytest.mark.parametrize("words", [["lr_scheduler=wsd"], ["lr_scheduler=cubic"], ["lr_scheduler_type=wsd"]])
def test_a_schedule_that_cannot_be_is_refused(words):
    with pytest.raises(ConfigError):
        load(words)


def test_without_an_evaluation_file_nothing_is_evaluated():
    cfg = load(["evaluation_strategy=steps", "eval_steps=5"])
    assert cfg.train.evaluation_strategy == "no"
    assert not cfg.train.do_eval
    assert note(cfg, "evaluation_strategy").reason == "no eval_dataset_path"


def test_an_evaluation_file_alone_is_evaluated_at_the_end():
    cfg = load(["eval_dataset_path=e.jsonl"])
    assert cfg.train.do_eval
    assert cfg.train.evaluation_strategy == "no"


def test_best_model_and_early_stop_need_evaluation():
    for word in ("load_best_model_at_end=True", "early_stopping_patience=2"):
        with pytest.raises(ConfigError, match="nothing is evaluated"):
            load([word])
    cfg = load(["load_best_model_at_end=True", "evaluation_strategy=steps", "eval_data=e.jsonl", "eval_steps=5"])
    assert cfg.checkpoint.metric_for_best_model == "loss"
    assert cfg.checkpoint.greater_is_better is False


EVALUATED = ["evaluation_strategy=steps", "eval_data=e.jsonl", "eval_steps=5"]


@pytest.mark.parametrize("metric", ["loss", "ppl", "eval_ppl"])
def test_less_loss_is_better(metric: str):
    assert load([*EVALUATED, f"metric_for_best_model={metric}"]).checkpoint.greater_is_better is False


@pytest.mark.parametrize(
    ("metric", "greater"),
    [
        ("sigmoid_loss", False),
        ("eval_sft_loss", False),
        ("rewards/rejected", False),
        ("rewards/accuracies", True),
        ("eval_rewards/margins", True),
        ("logps/chosen", True),
    ],
)
def test_each_number_of_preference_training_is_better_its_own_way(metric: str, greater: bool):
    words = ["stage=DPO", *EVALUATED, f"metric_for_best_model={metric}"]
    assert load(words).checkpoint.greater_is_better is greater
    assert load([*words, f"greater_is_better={not greater}"]).checkpoint.greater_is_better is not greater


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["metric_for_best_model=losss"], "did you mean loss?"),
        (["metric_for_best_model=accuracy"], "use one of those"),
        (["stage=DPO", "metric_for_best_model=eval_rewards/margin"], "did you mean rewards/margins?"),
        (["stage=DPO", "loss_type=hinge", "metric_for_best_model=sigmoid_loss"], "did you mean"),
    ],
)
def test_a_metric_that_no_evaluation_tells_is_refused(words: list[str], near: str):
    with pytest.raises(ConfigError, match=r"an evaluation of (SFT|DPO) reports loss") as caught:
        load([*EVALUATED, "early_stopping_patience=2", *words])
    assert near in caught.value.fix


def test_at_least_two_checkpoints_are_kept():
    cfg = load(["save_total_limit=1"])
    assert cfg.checkpoint.save_total_limit == 2
    assert not note(cfg, "save_total_limit").quiet
    assert load(["save_total_limit=0"]).checkpoint.save_total_limit is None


def test_all_options_of_checkpoints_are_the_two_they_stand_for():
    cfg = load(["unified_checkpoint_config=async_save enable_all_options"])
    assert cfg.checkpoint.unified_checkpoint_config == (
        "async_save", "skip_save_model_weight", "master_weight_compatible",
    )  # fmt: skip


def test_compressed_states_can_be_disabled():
    cfg = load(["ckpt_quant_stage=O1", "--disable_ckpt_quant"])
    assert cfg.checkpoint.ckpt_quant_stage == "O0"
    assert note(cfg, "ckpt_quant_stage").reason == "disable_ckpt_quant is True"


def test_several_files_share_format_and_weight_unless_told_otherwise():
    cfg = load(["--data", "a.jsonl,b.jsonl", "train_dataset_type=alpaca"])
    assert cfg.data.train_dataset_type == ("alpaca", "alpaca")
    assert cfg.data.train_dataset_prob == (0.5, 0.5)
    with pytest.raises(ConfigError, match="3 entries for 2 files"):
        load(["--data", "a.jsonl,b.jsonl", "train_dataset_prob=1,1,1"])
    with pytest.raises(ConfigError, match="is 0"):
        load(["--data", "a.jsonl", "train_dataset_prob=0"])


def test_keys_of_another_stage_are_remarked_upon():
    cfg = load(["beta=0.5", "fine_tuning=Full", "lora_rank=4"])
    assert note(cfg, "beta").reason == "without effect: stage is SFT"
    assert note(cfg, "lora_rank").reason == "without effect: fine_tuning is Full"


def test_preference_losses_without_reference():
    cfg = load(["stage=DPO", "loss_type=orpo"])
    assert cfg.dpo.reference_free
    assert cfg.dpo.sft_loss_ratio == 1.0


def test_the_train_command_trains():
    assert load([]).train.do_train
    assert not load([], "chat").train.do_train
    assert not load(["do_train=False"]).train.do_train


def test_old_device_switch_means_cpu():
    assert load(["--no_cuda"]).train.device == "cpu"


def test_every_note_that_changes_a_value_gives_the_value_of_the_run():
    cfg = load(["compute_type=fp8", "--rslora_plus", "--sequence_parallel", "save_total_limit=1"])
    last = {n.key: n.new for n in cfg.notes}
    assert {k: cfg[k] for k in last} == last
