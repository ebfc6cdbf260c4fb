"""The four input shapes and their mixes: every spelling reaches the same key, each value knows its origin."""

from __future__ import annotations

import json

import pytest

from erniekit.config import load
from erniekit.config.flat import KEYS
from erniekit.errors import ConfigError


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("seed: 7\nlearning_rate: 5e-7\nmax_steps: 100\n")
    return str(path)


def error(*words, command="train"):
    with pytest.raises(ConfigError) as e:
        load(list(words), command)
    return e.value


@pytest.mark.parametrize(
    "words",
    [
        ["--max_steps", "3"],
        ["--max-steps", "3"],
        ["--max_steps=3"],
        ["--max-steps=3"],
        ["max_steps=3"],
        ["--max_steps", "9", "--max_steps", "3"],
        ["max_steps=9", "--max_steps", "3"],
    ],
)
def test_every_spelling_of_a_key_gives_the_same_value(words):
    assert load(words).train.max_steps == 3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--recompute"], True),
        (["--recompute", "1"], True),
        (["--recompute", "False"], False),
        (["--recompute", "0", "--recompute"], True),
        (["--recompute", "--seed", "3"], True),
        (["--recompute=0"], False),
        (["recompute=true"], True),
    ],
)
def test_truth_flags_stand_bare_or_with_a_value_and_the_last_wins(words, expected):
    assert load(words).memory.recompute is expected


def test_a_bare_truth_flag_before_the_recipe_does_not_swallow_it(recipe):
    cfg = load(["--recompute", recipe])
    assert cfg.memory.recompute
    assert cfg.train.seed == 7


def test_list_flags_take_several_words_and_inert_ones_too():
    cfg = load(
        ["--report_to", "tensorboard", "wandb", "--amp_custom_white_list", "matmul", "flash_attn", "--seed", "3"]
    )
    assert cfg.tracking.report_to == ("tensorboard", "wandb")
    assert cfg.ignored[0].value == "matmul,flash_attn"
    assert cfg.train.seed == 3


@pytest.mark.parametrize("words", [["--tasks", "my.yaml"], ["--tasks=my.yaml"], ["tasks=my.yaml"]])
def test_a_task_file_behind_tasks_is_a_task_and_what_follows_it_a_recipe(words, recipe):
    for line in ([*words, recipe], [recipe, *words]):
        cfg = load(line, "eval")
        assert cfg.train.eval_tasks == ("my.yaml",)
        assert cfg.train.seed == 7
    both = load(["--tasks", "hellaswag,my.yaml", "--seed", "3"], "eval")
    assert both.train.eval_tasks == ("hellaswag", "my.yaml")
    assert load(["--tasks", "hellaswag", recipe], "eval").train.seed == 7
    assert "--report_to needs a value" in str(error("--report_to", recipe))


def test_an_empty_string_is_a_value():
    cfg = load(["--moe_multimodal_dispatch_use_allgather", "", "--seed", "3"])
    assert cfg.moe.moe_multimodal_dispatch_use_allgather == ""
    assert cfg.train.seed == 3


def test_negative_numbers_are_values_not_flags():
    assert load(["--max_steps", "-1"]).train.max_steps == -1


def test_key_value_words_follow_yaml_rules():
    cfg = load(["report_to=[tensorboard,wandb]", "model_config={a: 1, b: [2, 3]}", "model_config.c=true"])
    assert cfg.tracking.report_to == ("tensorboard", "wandb")
    assert cfg.model.model_config == {"a": 1, "b": [2, 3], "c": True}


def test_the_command_line_wins_over_the_file_whatever_their_order(recipe):
    assert load([recipe, "max_steps=3"]).train.max_steps == 3
    assert load(["--max_steps", "3", recipe]).train.max_steps == 3


def test_json_and_several_files_merge_in_order(recipe, tmp_path):
    other = tmp_path / "more.json"
    other.write_text(json.dumps({"seed": 8, "batch_size": 2}))
    cfg = load([recipe, str(other)])
    assert (cfg.train.seed, cfg.train.batch_size, cfg.train.max_steps) == (8, 2, 100)


def test_origins_name_the_line_the_flag_the_word_or_the_rule(recipe):
    cfg = load([recipe, "max_steps=3", "--batch-size", "2"], overrides={"weight_decay": 0.1})
    assert cfg.origin("seed") == f"{recipe}:1"
    assert cfg.origin("learning_rate") == f"{recipe}:2"
    assert cfg.origin("max_steps") == "key=value"
    assert cfg.origin("batch_size") == "flag --batch-size"
    assert cfg.origin("weight_decay") == "argument"
    assert cfg.origin("global_batch_size") == "derived"
    assert cfg.origin("adam_beta1") == "default"


def test_friendly_names_reach_their_key():
    cfg = load(["--data", "my.jsonl", "--max_seq_length", "128", "--eval_strategy", "no"])
    assert cfg.data.train_dataset_path == ("my.jsonl",)
    assert cfg.data.train_dataset_type == ("auto",)
    assert cfg.data.max_seq_len == 128


def test_a_sectioned_file_is_flattened_and_keeps_its_lines(tmp_path):
    path = tmp_path / "pt.yaml"
    path.write_text(
        "env:\n  HOME: null\nmodel_args:\n  max_seq_length: 4096\n  model_config:\n    num_hidden_layers: 6\n"
        "trainer_args:\n  max_steps: 5\n"
    )
    cfg = load([str(path), "trainer_args.max_steps=7"])
    assert cfg.train.stage == "PT"
    assert (cfg.data.max_seq_len, cfg.train.max_steps) == (4096, 7)
    assert cfg.model.model_config == {"num_hidden_layers": 6}
    assert cfg.origin("max_seq_len") == f"{path}:4"


def test_an_unknown_yaml_key_names_the_nearest_and_its_line(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("seed: 1\nlearning_rat: 0.1\n")
    e = error(str(path))
    assert "learning_rat" in e.what
    assert "learning_rate" in e.fix
    assert e.where == f"{path}:2"


def test_an_unknown_flag_names_the_nearest():
    e = error("--lora_dropout", "0.1")
    assert "lora_dropout" in e.what
    assert e.where == "flag --lora_dropout"
    assert "did you mean" in e.fix


def test_a_mistyped_key_after_a_list_flag_is_not_taken_for_a_file():
    assert "lora_dropout" in error("--data", "a.jsonl", "lora_dropout=0.1").what


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (["a=one"], ("a=one",)),
        (["a=one,b=two"], ("a=one", "b=two")),
        (["a=one", "b=two"], ("a=one", "b=two")),
    ],
)
def test_a_list_of_names_and_folders_follows_its_flag(words, want):
    cfg = load(["--lora_modules", *words, "seed=3"], "server")
    assert cfg.serve.lora_modules == want
    assert cfg.train.seed == 3
    assert load(["--data", "part=1.jsonl"]).data.train_dataset_path == ("part=1.jsonl",)
    assert "--lora_modules needs a value" in error("--lora_modules", "seed=3").what


def test_a_name_that_is_a_key_too_is_told_how_a_list_takes_it() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["--lora_modules", "data=/a"], "server")
    assert caught.value.fix == "data is a key, too: --lora_modules=data=/a gives it to --lora_modules"
    assert load(["--lora_modules=data=/a"], "server").serve.lora_modules == ("data=/a",)


@pytest.mark.parametrize(
    ("words", "kernels"),
    [
        (["--kernels", "attention=sdpa"], ("attention=sdpa",)),
        (["--kernels", "experts=plain", "attention=sdpa"], ("experts=plain", "attention=sdpa")),
        (["--kernels", "packed attention=flash", "attention=sdpa"], ("packed attention=flash", "attention=sdpa")),
        (["--kernels=attention=sdpa"], ("attention=sdpa",)),
        (["kernels=attention=sdpa,packed attention=flash"], ("attention=sdpa", "packed attention=flash")),
    ],
)
def test_an_operation_behind_kernels_is_a_kernel_though_it_is_a_key_too(words: list[str], kernels: tuple) -> None:
    cfg = load([*words, "seed=3"])
    assert (cfg.model.kernels, cfg.model.attention, cfg.train.seed) == (kernels, "auto", 3)
    assert load([*words, "--attention", "varlen"]).model.attention == "varlen"


def test_the_operations_that_config_names_are_those_of_the_kernels() -> None:
    from erniekit.kernels.selection import OPERATIONS

    assert KEYS["kernels"].names == tuple(OPERATIONS)


def test_a_list_whose_flag_is_followed_by_a_key_is_told_by_its_own_example() -> None:
    told = error("--kernels", "seed=3")
    assert told.what == "--kernels needs a value"
    assert "experts=plain" in told.fix
    assert load(["--kernels", "experts=plain"]).model.kernels == ("experts=plain",)


@pytest.mark.parametrize("words", [["--output_dir", ""], ["--output_dir="], ["output_dir="], ["--output-dir", " "]])
def test_an_empty_output_dir_on_the_command_line_is_an_error(words: list[str]) -> None:
    told = error(*words)
    assert told.what == "the value of output_dir is empty"
    assert "output_dir=DIR" in told.fix


def test_all_unknown_flags_are_named_at_once():
    e = error("--learning_rat", "3", "--max_stepz", "4", "--seed", "5")
    assert "learning_rat" in e.what
    assert "max_stepz" in e.what


def test_all_unknown_keys_of_a_file_are_named_at_once(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("cutoff_len: 1\nlora_r: 8\n")
    e = error(str(path))
    assert "max_seq_len" in e.fix
    assert "lora_rank" in e.fix


def test_a_wrong_type_names_file_and_line(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("seed: 1\nmax_steps: many\n")
    e = error(str(path))
    assert e.where == f"{path}:2"
    assert "'many'" in e.what
    assert "whole number" in e.what


def test_a_flag_without_its_value_says_so():
    assert "needs a value" in error("--max_steps").what
    assert "needs a value" in error("--max_steps", "--seed", "3").what


def test_a_word_that_is_nothing_known_is_refused():
    assert "cannot interpret" in error("banana").what
    assert "--max_steps" in error("max_steps").fix
    assert "program" in error("train.py").what


def test_a_folder_after_chat_is_the_model_and_after_export_the_output():
    assert load(["out/export"], "chat").model.model_name_or_path == "out/export"
    assert load(["out"], "export").train.output_dir == "out"
    assert load(["a.jsonl", "b.json"], "data").data.train_dataset_path == ("a.jsonl", "b.json")


@pytest.mark.parametrize(
    ("command", "words", "key"),
    [
        ("chat", ["a", "b"], "model_name_or_path"),
        ("server", ["a", "--model_name_or_path", "b"], "model_name_or_path"),
        ("eval", ["model_name_or_path=b", "a"], "model_name_or_path"),
        ("export", ["a", "output_dir=b"], "output_dir"),
        ("export", ["a", "lora_path=c", "model_name_or_path=d", "output_dir=b"], "output_dir"),
        ("split", ["a", "b"], "output_dir"),
        ("data", ["a.jsonl", "train_dataset_path=b.jsonl"], "train_dataset_path"),
    ],
)
def test_a_bare_word_never_vanishes_behind_another_word_for_its_key(command, words, key):
    refused = error(*words, command=command)
    assert f"both name {key}" in refused.what
    assert "a" in refused.what
    assert refused.fix


def test_a_bare_word_counts_over_a_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model_name_or_path: base\noutput_dir: out\n")
    assert load([str(recipe), "mine"], "chat").model.model_name_or_path == "mine"
    assert load([str(recipe), "mine"], "export").train.output_dir == "mine"


def test_beside_lora_path_a_word_after_export_is_the_base_unless_that_is_named(tmp_path):
    cfg = load(["base", "lora_path=a,b", "output_dir=dest"], "export")
    assert (cfg.model.model_name_or_path, cfg.train.output_dir) == ("base", "dest")
    assert cfg.lora.lora_path == ("a", "b")
    cfg = load(["dest", "--lora_path", "a", "--model_name_or_path", "base"], "export")
    assert (cfg.model.model_name_or_path, cfg.train.output_dir) == ("base", "dest")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model_name_or_path: base\nlora_path: a\n")  # what a recipe says changes no word's meaning
    assert load([str(recipe), "out"], "export").train.output_dir == "out"
