"""Every command line of the seed documents resolves; the pre-training recipes they lead to resolve as well."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from erniekit.config import for_world, load, refuse_not_yet_supported
from erniekit.config.flat import KEYS
from erniekit.errors import NotYetSupportedError

DATA = Path(__file__).parents[1] / "data" / "recipes"
PRETRAINING = sorted((Path(__file__).parents[2] / "examples" / "pre-training").rglob("*.yaml"))
LINES = [line for line in (DATA / "seed_commands.txt").read_text().splitlines() if line and line[0] != "#"]


def script_defaults(root: Path) -> list[str]:
    return runpy.run_path(str(root / "examples/post-training/sft/train.py"))["SCRIPT_DEFAULTS"]


def resolve(line: str, root: Path):
    _, program, *words = shlex.split(line)
    if program == "erniekit":
        return load(words[1:], words[0])
    if program.endswith("/train.py"):
        return load([*script_defaults(root), *words], "train")
    return load([str(DATA / "pretrain-llama_13b.json")], "train")


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line.split()[:4]))
def test_the_command_resolves(line, root, monkeypatch):
    monkeypatch.chdir(root)
    assert resolve(line, root).model.model_name_or_path


def test_all_commands_are_there():
    assert [line[:3] for line in LINES] == ["000", "001", "002", "002", *["004"] * 9, "003"]


def test_the_scripts_train_what_they_say(root):
    lora_16_cards, mixed, npu_full, npu_lora = (resolve(line, root) for line in LINES[:4])
    assert (lora_16_cards.lora.lora, lora_16_cards.lora.lora_rank) == (True, 32)
    assert len(lora_16_cards.data.train_dataset_path) == len(lora_16_cards.data.train_dataset_prob) == 6
    assert lora_16_cards.precision.compute_type == "bf16"
    assert mixed.parallel.tensor_parallel_degree == 8
    assert npu_full.lora.fine_tuning == "Full"
    assert npu_full.optim.weight_decay == 0.1  # given twice: the last counts
    assert npu_full.moe.moe_multimodal_dispatch_use_allgather == ""  # given twice, the second time empty
    assert npu_full.memory.offload_optim  # a bare flag
    assert npu_full.moe.moe_use_aux_free is False
    assert npu_lora.lora.lora
    assert any(n.key == "warmup_steps" for n in npu_lora.notes)  # 2000 of 200 steps
    assert (lora_16_cards.parallel.tensor_parallel_degree, lora_16_cards.parallel.pipeline_parallel_degree) == (4, 4)
    assert (npu_full.parallel.tensor_parallel_degree, npu_full.parallel.pipeline_parallel_degree) == (8, 16)


def test_the_scripts_stop_neither_for_their_devices_nor_for_their_layouts(root):
    for line in LINES[:4]:
        cfg = resolve(line, root)
        refuse_not_yet_supported(cfg)


def test_the_server_takes_the_recipe_of_the_chat(root):
    cfg = load([str(root / "examples/configs/ERNIE-4.5-0.3B/run_chat.yaml")], "server")
    assert (cfg.serve.port, cfg.serve.max_model_len, cfg.serve.engine) == (8188, 131072, "auto")
    refuse_not_yet_supported(cfg, "server")


def test_the_sectioned_pre_training_recipe_resolves():
    cfg = load([str(DATA / "pretrain_21b_sectioned.yaml")])
    assert (cfg.train.stage, cfg.lora.fine_tuning) == ("PT", "Full")
    assert (cfg.data.max_seq_len, cfg.train.batch_size, cfg.train.global_batch_size) == (4096, 2, 128)
    assert cfg.optim.lr_scheduler_type == "wsd"
    assert cfg.model.model_config["fp8_mem_configs"] == {"recompute_fwd_gate_up": [6, 7, 8], "dequant_input": True}
    assert not cfg.model.continue_training  # from_scratch: 1
    with pytest.raises(NotYetSupportedError, match="fp8 training"):
        refuse_not_yet_supported(cfg)


def test_the_sectioned_recipe_trains_once_fp8_is_off(tmp_path):
    """As ERNIE's own script is called: several files, and dotted words behind --kwargs."""
    more = tmp_path / "more.yaml"
    more.write_text("model_args:\n    model_config:\n        use_fp8_mlp: false\n        moe_k: 4\n")
    words = ["--configs", str(DATA / "pretrain_21b_sectioned.yaml"), str(more)]
    words += ["--kwargs", "trainer_args.max_steps=3", "model_args.model_config.fp8_mem_configs.dequant_input=false"]
    cfg = load(words)
    refuse_not_yet_supported(cfg)
    assert cfg.train.max_steps == 3
    assert cfg.model.model_config["moe_k"] == 4
    assert cfg.model.model_config["num_hidden_layers"] == 28  # of the first file
    assert cfg.model.model_config["fp8_mem_configs"] == {"recompute_fwd_gate_up": [6, 7, 8], "dequant_input": False}


def test_the_llama_13b_recipe_resolves_under_its_own_names():
    cfg = load([str(DATA / "pretrain-llama_13b.json")])
    assert (cfg.data.max_seq_len, cfg.optim.min_lr, cfg.model.tokenizer_name) == (2048, 1e-5, "llama-13b")
    assert (cfg.model.continue_training, cfg.model.initializer_range) == (False, 0.002)
    assert (cfg.train.do_eval, cfg.train.evaluation_strategy) == (True, "steps")
    with pytest.raises(NotYetSupportedError, match="fp16 training"):
        refuse_not_yet_supported(cfg)
    refuse_not_yet_supported(cfg.replace(compute_type="bf16"))


@pytest.mark.parametrize("path", PRETRAINING, ids=lambda path: path.stem)
def test_a_shipped_pre_training_recipe_keeps_its_global_batch_on_any_cluster(path):
    cfg = load([str(path)])
    refuse_not_yet_supported(cfg)
    assert cfg.train.stage == "PT"
    accumulation = int(re.search(r"gradient_accumulation_steps: (\d+)", path.read_text())[1])
    data_ranks = 4 if "llama" in path.stem else cfg.parallel.sharding_parallel_degree
    assert for_world(cfg, data_ranks).train.gradient_accumulation_steps == accumulation
    assert for_world(cfg, data_ranks // 2).train.gradient_accumulation_steps == 2 * accumulation


def test_the_shipped_llama_13b_recipe_holds_the_recorded_values():
    ours = load([str(next(path for path in PRETRAINING if "llama" in path.stem))])
    theirs = load([str(DATA / "pretrain-llama_13b.json")])
    named = {"global_batch_size", "gradient_accumulation_steps", "split"}
    other_format = {"compute_type", "bf16", "fp16"}
    idle = {"pipeline_parallel_config", "disable_tqdm"}
    named |= {"model_name_or_path", "tokenizer_name"}  # the folder in examples/
    assert {key for key in KEYS if ours[key] != theirs[key]} == named | other_format | idle


def test_the_shipped_21b_pre_training_recipe_holds_the_recorded_values(root):
    ours = load([str(root / "examples/pre-training/yamls/ERNIE-4p5-21B-A3B/pretrain_8_gpus.yaml")])
    theirs = load([str(DATA / "pretrain_21b_sectioned.yaml")])
    assert ours.model.model_config.items() < dict(theirs.model.model_config).items()
    beside = {"moe_orthogonal_loss_lambda", "multi_token_pred_lambda"}  # documented with the model, not in the YAML
    beside.add("model_name_or_path")  # the folder in examples/
    idle = {"scale_loss", "disable_tqdm", "overwrite_output_dir"}
    assert {key for key in KEYS if ours[key] != theirs[key]} - {"model_config"} == beside | idle
