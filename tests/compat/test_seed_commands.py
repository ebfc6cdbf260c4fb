"""Every command line of the seed documents resolves; the pre-training recipes they lead to resolve as well."""

from __future__ import annotations

import runpy
import shlex
from pathlib import Path

import pytest

from erniekit.cli.main import main
from erniekit.config import later, load, refuse_later
from erniekit.errors import LaterError

DATA = Path(__file__).parents[1] / "data" / "recipes"
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


def test_the_scripts_stop_for_their_devices_not_for_their_layouts(root):
    for line in LINES[:4]:
        cfg = resolve(line, root)
        assert {item.key for item in later(cfg) if item.stops} <= {"device"}
        refuse_later(cfg.replace(device="gpu"))


def test_the_server_is_refused_by_name(capsys):
    assert main(["server", "examples/configs/ERNIE-4.5-0.3B/run_chat.yaml"]) == 2
    assert "not in this version: the OpenAI-compatible server" in capsys.readouterr().err


def test_the_sectioned_pre_training_recipe_resolves():
    cfg = load([str(DATA / "pretrain_21b_sectioned.yaml")])
    assert (cfg.train.stage, cfg.lora.fine_tuning) == ("PT", "Full")
    assert (cfg.data.max_seq_len, cfg.train.batch_size, cfg.train.global_batch_size) == (4096, 2, 128)
    assert cfg.optim.lr_scheduler_type == "wsd"
    assert cfg.model.model_config["fp8_mem_configs"] == {"recompute_fwd_gate_up": [6, 7, 8], "dequant_input": True}
    with pytest.raises(LaterError, match="pre-training"):
        refuse_later(cfg)


def test_the_llama_13b_recipe_resolves_under_its_own_names():
    cfg = load([str(DATA / "pretrain-llama_13b.json")])
    assert (cfg.data.max_seq_len, cfg.optim.min_lr, cfg.model.tokenizer_name) == (2048, 1e-5, "llama-13b")
    assert cfg.precision.compute_type == "fp16"
    assert not cfg.model.continue_training
