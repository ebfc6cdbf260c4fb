"""`erniekit migrate`: writes a recipe that reads back as the run, overwrites nothing, refuses in three lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.cli.main import main
from erniekit.config import load

SCRIPT = """\
unset PADDLE_TRAINERS_NUM
export NCCL_IB_HCA=mlx5
python -m paddle.distributed.launch --gpus 0,1 --master 10.0.0.1:8021 --nnodes 2 \\
    examples/post-training/sft/train.py --model_name_or_path m --bf16 --lora \\
    --train_dataset_path "a.jsonl,b.jsonl" --train_dataset_prob "0.5,0.5" --tensor_parallel_degree 2 \\
    --learning_rate 5e-7 --sharding "stage1" --fuse_rope 1 --pipeline_parallel_config "disable_partial_send_recv"
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(SCRIPT)
    return tmp_path


def refused(capsys, *words: str) -> str:
    assert main(["migrate", *words]) == 2
    err = capsys.readouterr().err.strip()
    assert len(err.splitlines()) == 3, err
    return err


def test_the_recipe_is_the_run_that_the_script_described(script, capsys):
    assert main(["migrate", "run.sh"]) == 0
    cfg = load(["run.yaml"])
    assert cfg.data.train_dataset_path == ("a.jsonl", "b.jsonl")
    assert cfg.data.train_dataset_prob == (0.5, 0.5)
    assert (cfg.optim.learning_rate, cfg.parallel.sharding, cfg.lora.fine_tuning) == (5e-7, ("stage1",), "LoRA")
    assert not cfg.ignored
    out = capsys.readouterr().out
    assert "line 6    fuse_rope 1: a kernel choice" in out
    assert "layout         tensor 2 = 2; the launch starts 4 ranks" in out
    assert "erniekit train run.yaml --gpus 0,1 --nnodes 2 --master 10.0.0.1:8021 --rank 1    # node 1" in out
    assert Path("run.yaml").read_text().count("--rank") == 2


def test_a_folder_that_is_named_by_a_part_of_another_is_in_the_recipe(script, capsys):
    settings = (
        "model_path=models/ERNIE-4.5-0.3B/\nmodel_path=${model_path%/}\nout=runs/${model_path##*/}-${TAG:-lora}\n"
    )
    Path("run.sh").write_text(settings + SCRIPT.replace("-path m", "-path ${model_path}").replace(
        " --bf16", " --output_dir ${out} --max_steps ${STEPS:-20} --bf16"
    ))  # fmt: skip
    assert main(["migrate", "run.sh"]) == 0
    cfg = load(["run.yaml"])
    assert (cfg.train.output_dir, cfg.train.max_steps) == ("runs/ERNIE-4.5-0.3B-lora", 20)


def test_nothing_is_ever_overwritten(script, capsys):
    Path("run.yaml").write_text("mine")
    assert "is there already" in refused(capsys, "run.sh")
    assert Path("run.yaml").read_text() == "mine"
    Path("run.yaml").unlink()
    Path("run.yaml").symlink_to("nowhere")  # nor written through
    assert "is there already" in refused(capsys, "run.sh")
    assert main(["migrate", "run.sh", "--output", "other.yaml"]) == 0


def test_several_runs_are_all_written_or_none(script, capsys):
    Path("x.yaml").write_text("seed: 3\n")
    Path("two.sh").write_text("erniekit train x.yaml\nerniekit train x.yaml seed=4\n")
    Path("two-2.yaml").write_text("mine")
    refused(capsys, "two.sh")
    assert not Path("two-1.yaml").exists()
    Path("two-2.yaml").unlink()
    assert main(["migrate", "two.sh"]) == 0
    assert [load([f"two-{i}.yaml"]).train.seed for i in (1, 2)] == [3, 4]


def test_print_writes_no_file(script, capsys):
    assert main(["migrate", "run.sh", "--print"]) == 0
    assert "tensor_parallel_degree: 2" in capsys.readouterr().out
    assert [p.name for p in script.iterdir()] == ["run.sh"]


def test_an_old_recipe_keeps_its_name_with_a_word_behind_it(script):
    Path("old.json").write_text('{"max_seq_length": 128, "fp16": true}')
    assert main(["migrate", "old.json"]) == 0
    cfg = load(["old-erniekit.yaml"])
    assert (cfg.data.max_seq_len, cfg.precision.compute_type) == (128, "bf16")


def test_what_does_not_resolve_names_the_lines_of_the_script(script, capsys):
    Path("run.sh").write_text(SCRIPT.replace("0.5,0.5", "0.5,0.3,0.2"))
    assert "run.sh:5" in refused(capsys, "run.sh")
    assert not Path("run.yaml").exists()


@pytest.mark.parametrize(
    "words",
    [[], ["absent.sh"], ["run.sh", "more"], ["run.sh", "--output"], ["run.sh", "--output", "x.txt"], ["--what"]],
)
def test_bad_input_is_three_lines(script, capsys, words):
    refused(capsys, *words)


def test_a_folder_that_is_not_there_is_a_users_mistake(script, capsys):
    assert "cannot write" in refused(capsys, "run.sh", "--output", "absent/x.yaml")
