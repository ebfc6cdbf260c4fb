"""What becomes of a script's words: our keys, a launch line for each machine, a remark for each word that changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.cli.main import main
from erniekit.config.migrate import migrate_file
from erniekit.errors import ConfigError

LAUNCH = "python -m paddle.distributed.launch"
SFT = "examples/post-training/sft/train.py --model_name_or_path m --output_dir o"


@pytest.fixture
def migrate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(text: str, name: str = "run.sh"):
        Path(name).write_text(text)
        return migrate_file(name)

    return run


def remarks(run, kind: str) -> dict[str, str]:
    return {r.what: f"{r.place} {r.why}" for r in run.remarks if r.kind == kind}


def test_a_script_trains_every_weight_in_fp32_unless_it_says_otherwise(migrate):
    (plain,) = migrate(f"{LAUNCH} {SFT}")
    assert (plain.values["fine_tuning"], plain.values["compute_type"]) == ("Full", "fp32")
    assert plain.values["train_dataset_path"] == "examples/data/sft-train.jsonl"
    assert "fine_tuning: Full" in remarks(plain, "added")
    (lora,) = migrate(f"{LAUNCH} {SFT} --lora --bf16 --lora_rank 4")
    assert (lora.values["fine_tuning"], lora.values["compute_type"], lora.values["lora_rank"]) == ("LoRA", "bf16", 4)
    assert remarks(lora, "changed").keys() == {"lora", "bf16"}


@pytest.mark.parametrize(
    ("script", "stage"),
    [("sft/train.py", "SFT"), ("dpo/dpo_train.py", "DPO"), ("vl_sft/train.py", "VL-SFT"), ("run_pretrain.py", "PT")],
)
def test_the_stage_is_what_the_script_trains(migrate, script, stage):
    (run,) = migrate(f"{LAUNCH} examples/post-training/{script} --bf16")
    assert run.values["stage"] == stage


def test_sizes_of_batches_stay_apart_where_they_differ(migrate):
    (one,) = migrate(f"{LAUNCH} {SFT} --per_device_train_batch_size 2 --per_device_eval_batch_size 2")
    assert one.values["batch_size"] == 2
    (two,) = migrate(f"{LAUNCH} {SFT} --per_device_train_batch_size 2 --per_device_eval_batch_size 64")
    assert (two.values["per_device_train_batch_size"], two.values["per_device_eval_batch_size"]) == (2, 64)
    assert "batch_size" not in two.values


def test_unknown_words_have_no_counterpart_and_say_the_nearest(migrate):
    (run,) = migrate(f"{LAUNCH} {SFT} \\\n --learning_rat 1 \\\n --zzqq 2")
    told = remarks(run, "no counterpart")
    assert "learning_rate" in told["learning_rat 1"]
    assert told["learning_rat 1"].startswith("run.sh:2 ")
    assert "no similar key" in told["zzqq 2"]


def test_a_value_that_only_the_shell_knows_is_left_to_the_command_line(migrate):
    (run,) = migrate(f"{LAUNCH} {SFT} --max_steps $1 --seed 3")
    assert "max_steps" not in run.values
    assert run.values["seed"] == 3
    assert "max_steps=VALUE" in remarks(run, "no counterpart")["max_steps $1"]


def test_secrets_are_neither_kept_nor_shown(migrate):
    (run,) = migrate(f"export MY_TOKEN=hush\n{LAUNCH} {SFT} --wandb_api_key hush")
    assert "hush" not in str(run)


SECRET = "s3cr3t-value"


@pytest.mark.parametrize(
    "text",
    [
        "{launch} --api_key {secret}",
        "{launch} --api-key={secret}",
        "{launch} --hf_token sk-{secret}",
        "{launch} --apiKey {secret}",
        "{launch} --model_confg https://me:{secret}@host/x",
        "{launch} --wandb_project {secret} --some_password {secret}",
        "KEY={secret}\n{launch} --wandb_project $KEY",
        "export HTTP_PROXY=http://me:{secret}@proxy:8\n{launch}",
        "export SERVICE_PWD_TOKEN={secret}\n{launch} --logging_dir out/$SERVICE_PWD_TOKEN",
        "wandb login {secret}\n{launch}",
        "huggingface-cli download x --token {secret}\n{launch}",
        "curl -H 'Authorization: Bearer {secret}' https://h/very/long/path/so/that/the/line/is/cut\n{launch}",
        "wget 'https://h/x?a=1&token={secret}'\n{launch}",
        "source env.sh --token {secret}\n{launch}",
        "TOKEN={secret}\npython -m paddle.distributed.launch --job_id $TOKEN --secret_key {secret} {sft}",
    ],
)
def test_no_secret_is_printed_or_written_wherever_it_stands(text, migrate, capsys):
    script = text.format(launch=f"{LAUNCH} {SFT}", secret=SECRET, sft=SFT)
    assert SECRET not in str(migrate(script))
    assert main(["migrate", "run.sh"]) == 0
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err + Path("run.yaml").read_text()


def test_no_secret_of_a_recipe_is_printed_or_written(migrate, capsys):
    lines = [f"{name}: {SECRET}" for name in ("api_key", "hub_token", "db_password")]
    text = "model_name_or_path: m\ntrain_dataset_path: d.jsonl\n" + "\n".join(lines)
    text += f"\nmodel_config: {{access_token: {SECRET}, hidden_size: 8}}\nrun_name: of-{SECRET}\n"
    (run,) = migrate(text, "old.yaml")
    assert SECRET not in str(run)
    assert remarks(run, "dropped").keys() >= {"api_key", "hub_token", "db_password", "model_config"}
    assert main(["migrate", "old.yaml"]) == 0
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err + Path("old-erniekit.yaml").read_text()


def test_no_secret_is_in_an_error(migrate, capsys):
    with pytest.raises(ConfigError) as e:
        migrate(f"TOKEN={SECRET}\n{LAUNCH} {SFT} $TOKEN stray")
    assert SECRET not in str(e.value)


def test_a_name_with_key_or_token_in_it_is_not_always_a_secret(migrate):
    (run,) = migrate(f"{LAUNCH} {SFT} --num_key_value_head 8 --eos_tokn x --max_tokns 9 --tokenizer_pth abcdefgh")
    assert {"num_key_value_head 8", "max_tokns 9", "tokenizer_pth abcdefgh"} <= remarks(run, "no counterpart").keys()


def test_two_names_of_one_key_with_two_values_are_refused_with_both_lines(migrate):
    with pytest.raises(ConfigError) as e:
        migrate(f"{LAUNCH} {SFT} \\\n --tensor_parallel_degree 4 \\\n --tensor_model_parallel_size 2")
    assert e.value.where == "run.sh:2 and run.sh:3"


def test_a_value_of_the_wrong_kind_is_refused_with_its_line(migrate):
    with pytest.raises(ConfigError) as e:
        migrate(f"{LAUNCH} {SFT} \\\n --max_steps many")
    assert e.value.where == "run.sh:2"


def test_one_machine_gets_one_line(migrate):
    (run,) = migrate(f"{LAUNCH} --log_dir L --gpus '0, 1' --master localhost:8080 --nnodes 1 {SFT}")
    assert run.machines.lines("train", "run.yaml") == [("", "erniekit train run.yaml --gpus 0,1 --log_dir L")]
    assert run.machines.ranks == 2


def test_each_of_several_machines_gets_its_line(migrate):
    (run,) = migrate(f"{LAUNCH} --npus 0,1 --master 10.0.0.1:8021 --nnodes 2 --rank 1 {SFT}")
    assert run.machines.lines("train", "r.yaml") == [
        ("node 0, 10.0.0.1", "erniekit train r.yaml --npus 0,1 --nnodes 2 --master 10.0.0.1:8021 --rank 0"),
        ("node 1", "erniekit train r.yaml --npus 0,1 --nnodes 2 --master 10.0.0.1:8021 --rank 1"),
    ]


def test_machines_that_are_named_by_address_are_numbered_in_that_order(migrate):
    (run,) = migrate(f"{LAUNCH} --ips=10.0.0.5,10.0.0.7 --gpus 0,1,2 {SFT}")
    lines = run.machines.lines("train", "r.yaml")
    assert [machine for machine, _ in lines] == ["node 0, 10.0.0.5", "node 1, 10.0.0.7"]
    assert all("--nnodes 2 --master 10.0.0.5:8080" in line for _, line in lines)
    assert run.machines.ranks == 6


def test_variables_of_the_launch_become_its_words(migrate):
    Path("r.yaml").write_text("seed: 3\n")
    (run,) = migrate("NNODES=2 MASTER_ADDR=$1 MASTER_PORT=$2 CUDA_VISIBLE_DEVICES=0,1 erniekit train r.yaml")
    assert run.machines.lines("train", "x.yaml")[1] == (
        "node 1",
        "erniekit train x.yaml --nnodes 2 --master $1:$2 --rank 1",
    )
    assert run.machines.setup() == ["export CUDA_VISIBLE_DEVICES=0,1"]


def test_many_machines_share_one_line(migrate):
    (run,) = migrate(f"{LAUNCH} --gpus 0 --master a:1 --nnodes 96 {SFT}")
    assert [machine for machine, _ in run.machines.lines("train", "r.yaml")] == ["every node"]


def test_variables_are_kept_or_dropped_with_the_reason(migrate):
    text = "export NCCL_IB_HCA=mlx5\nexport FLAGS_x=1\nexport PADDLE_XCCL_BACKEND=npu\nexport OTHER=1\n"
    (run,) = migrate(f"{text}source /usr/local/Ascend/set_env.sh\n{LAUNCH} {SFT}")
    assert run.machines.setup() == ["source /usr/local/Ascend/set_env.sh", "export NCCL_IB_HCA=mlx5", "export OTHER=1"]
    assert "FLAGS_x=1" in remarks(run, "dropped")
    assert run.values["device"] == "npu"


def test_a_recipe_behind_the_command_is_read_and_later_words_win(migrate):
    Path("x.yaml").write_text("seed: 3\nmax_steps: 10\nfuse_rope: True\n")
    (run,) = migrate("erniekit train x.yaml max_steps=20 --lora True")
    assert (run.values["seed"], run.values["max_steps"], run.command) == (3, 20, "train")
    assert "x.yaml:3" in remarks(run, "dropped")["fuse_rope True"]
    assert "x.yaml:2 given again in run.sh:1" in remarks(run, "dropped")["max_steps 10"]


def test_a_recipe_that_is_not_there_is_refused_with_the_line_that_names_it(migrate):
    with pytest.raises(ConfigError) as e:
        migrate("cd x\nerniekit train absent.yaml")
    assert e.value.where == "run.sh:2"


def test_every_run_of_a_script_becomes_a_recipe(migrate):
    Path("x.yaml").write_text("seed: 3\n")
    runs = migrate("erniekit train x.yaml\nerniekit export x.yaml lora=True\n")
    assert [run.command for run in runs] == ["train", "export"]


def test_a_recipe_of_paddleformers_turns_recompute_on_in_its_own_way(migrate):
    text = "tensor_model_parallel_size: 2\nrecompute_granularity: full\nrecompute_method: uniform\nbinpacking: true\n"
    (run,) = migrate(text, "theirs.yaml")
    assert (run.values["recompute"], run.values["tensor_parallel_degree"]) == (True, 2)
    assert "tensor_model_parallel_size 2" in remarks(run, "changed")
    assert "binpacking true" in remarks(run, "no counterpart")


@pytest.mark.parametrize("text", ["", "echo hello\n", "python other.py --x 1\n", "# erniekit train x.yaml\n"])
def test_a_script_that_starts_no_run_is_refused(migrate, text):
    with pytest.raises(ConfigError, match="starts no known training program"):
        migrate(text)


def test_what_is_no_text_is_refused(migrate, tmp_path):
    (tmp_path / "run.sh").write_bytes(b"\xff\xfe\x00")
    for name in ("run.sh", "absent.sh", str(tmp_path)):
        with pytest.raises(ConfigError):
            migrate_file(name)
