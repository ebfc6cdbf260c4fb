"""Each seed document's launch script goes through `erniekit migrate` and comes out as the run it describes."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.cli.main import main
from erniekit.config import load, refuse_not_yet_supported

DATA = Path(__file__).parents[1] / "data" / "migrate"
SCRIPTS = sorted(path.name for path in DATA.glob("*.sh"))


@pytest.fixture
def migrated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(name: str):
        assert main(["migrate", str(DATA / name)]) == 0
        return load([Path(name).with_suffix(".yaml").name]), capsys.readouterr().out

    return run


def starts(out: str) -> list[str]:
    return [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("start")]


@pytest.mark.parametrize("name", SCRIPTS)
def test_its_recipe_resolves_and_needs_no_later_version(migrated, name):
    cfg, out = migrated(name)
    assert not cfg.ignored
    refuse_not_yet_supported(cfg)
    assert "no counterpart" not in out
    assert "they do not fit" not in out


def test_there_is_one_for_each_script_of_the_seeds():
    assert SCRIPTS == [
        "ascend_300b_lora.sh",
        "ascend_300b_sft.sh",
        "iluvatar_21b_lora.sh",
        "llama_13b_four_nodes.sh",
        "nvidia_iluvatar_21b_lora.sh",
    ]


def test_sixteen_iluvatar_cards(migrated):
    cfg, out = migrated("iluvatar_21b_lora.sh")
    assert (cfg.train.device, cfg.lora.lora_rank, cfg.precision.compute_type) == ("iluvatar_gpu", 32, "bf16")
    assert len(cfg.data.train_dataset_path) == len(cfg.data.train_dataset_prob) == 6
    assert cfg.train.output_dir == "ERNIE-4.5-21B-A3B-Paddl_sft_lora_8k_checkpoint"
    (line,) = starts(out)
    assert line.endswith(
        "--gpus 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15 --log_dir ERNIE-4.5-21B-A3B-Paddl_sft_lora_8k_log"
    )
    assert "layout         tensor 4 x pipeline 4 = 16; the launch starts 16 ranks" in out


def test_two_machines_of_two_vendors(migrated):
    cfg, out = migrated("nvidia_iluvatar_21b_lora.sh")
    assert (cfg.parallel.tensor_parallel_degree, cfg.parallel.pipeline_parallel_degree) == (8, 2)
    assert "FlagCX: it joins cards of two vendors" in out
    assert "adapters over random weights" in out
    assert "export FLAGCX_IB_HCA=mlx5" in out
    assert [line[-14:] for line in starts(out)] == ["0, 10.1.15.172", " 1    # node 1"]


def test_eight_machines_of_sixteen_ascend_cards(migrated):
    cfg, out = migrated("ascend_300b_sft.sh")
    assert (cfg.lora.fine_tuning, cfg.optim.weight_decay, cfg.memory.offload_optim) == ("Full", 0.1, True)
    assert cfg.moe.moe_multimodal_dispatch_use_allgather == ""
    assert "weight_decay 0.01: given again" in out
    assert len(starts(out)) == 8
    assert all("--nnodes 8 --master 141.61.41.162:12123" in line for line in starts(out))
    assert "source /usr/local/Ascend/ascend-toolkit/set_env.sh" in out
    assert "tensor 8 x pipeline 16 = 128; the launch starts 128 ranks" in out


def test_four_machines_of_the_llama_script(migrated):
    cfg, out = migrated("llama_13b_four_nodes.sh")
    assert (cfg.train.stage, cfg.precision.compute_type, cfg.data.max_seq_len) == ("PT", "bf16", 2048)
    assert cfg.train.per_device_eval_batch_size == 64
    assert [line.rpartition(" ")[2] for line in starts(out)] == ["10.0.0.12", "10.0.0.104", "10.0.0.115", "10.0.0.143"]


def test_commands_of_the_guide_migrate_where_their_recipes_are(root, tmp_path, monkeypatch):
    monkeypatch.chdir(root)
    script = tmp_path / "guide.sh"
    recipes = "examples/configs/ERNIE-4.5-0.3B"
    script.write_text(
        "huggingface-cli download baidu/ERNIE-4.5-0.3B-Paddle --local-dir baidu/ERNIE-4.5-0.3B-Paddle\n"
        f"erniekit train {recipes}/sft/run_sft_lora_8k.yaml\n"
        f"erniekit export {recipes}/run_export.yaml lora=True\n"
        f"erniekit server {recipes}/run_chat.yaml\n"
    )
    assert main(["migrate", str(script), "--output", str(tmp_path / "out.yaml")]) == 0
    cfg = load([str(tmp_path / "out-1.yaml")])
    theirs = load([f"{recipes}/sft/run_sft_lora_8k.yaml"])
    assert cfg.flat() == theirs.flat()
    assert load([str(tmp_path / "out-3.yaml")], "server").serve.max_model_len == 131072
