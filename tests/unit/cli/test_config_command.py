"""`erniekit config`: the resolved run on one screen, each value with its origin, nothing heavy imported."""

from __future__ import annotations

import json

import pytest

from erniekit.cli.config_command import config_command, purpose
from erniekit.cli.main import main
from erniekit.config import load
from erniekit.config.flat import KEYS

WORDS = "pipeline_parallel_config=use_dualpipev,enable_timer"
RECIPE = "examples/configs/ERNIE-4.5-0.3B/sft/run_sft_lora_8k.yaml"


def shown(capsys, *args):
    assert config_command(list(args)) == 0
    return capsys.readouterr().out.splitlines()


def test_a_recipe_fits_a_screen_and_says_where_values_come_from(root, capsys):
    lines = shown(capsys, str(root / RECIPE), "max_steps=3", "--seed", "5")
    text = "\n".join(lines)
    assert len(lines) <= 40
    assert "max_steps 3  (key=value)" in text
    assert "seed 5  (flag --seed)" in text
    assert "lora_alpha: -1 -> 64 (2 x lora_rank)" in text
    assert "lora_rank 32  :5" in text


def test_inert_and_later_keys_are_told_with_their_reason(root, capsys):
    text = "\n".join(shown(capsys, str(root / RECIPE), "fuse_rope=1", "compute_type=fp16", WORDS))
    assert "fuse_rope (a kernel choice" in text
    assert "fp16 training (stops the run)" in text
    assert "pipeline_parallel_config use_dualpipev (key=value)  the DualPipeV schedule;" in text
    assert "enable_timer (step times are always in metrics.jsonl)" in text


def test_all_shows_every_key(root, capsys):
    text = "\n".join(shown(capsys, str(root / RECIPE), "--all"))
    assert [name for name in KEYS if name not in text] == []


def test_json_is_the_run_and_what_it_waits_for(root, capsys):
    data = json.loads("\n".join(shown(capsys, str(root / RECIPE), "stage=OCR-VL-SFT", "--json")))
    assert data["values"]["lora_alpha"] == 64
    assert data["origins"]["stage"] == "key=value"
    assert data["later"][0]["key"] == "stage"


@pytest.mark.parametrize(
    ("name", "command"),
    [("sft/run_sft_8k", "train"), ("run_eval", "eval"), ("run_export", "export"), ("run_chat", "chat")],
)
def test_the_purpose_of_a_recipe_is_seen_from_its_keys(root, name, command):
    cfg = load([str(root / f"examples/configs/ERNIE-4.5-0.3B/{name}.yaml")], "config")
    assert purpose(cfg) == command


def test_a_purpose_can_be_given(root, capsys):
    assert "erniekit chat" in shown(capsys, str(root / RECIPE), "--for", "chat")[0]


def test_mistakes_are_told_with_their_line(tmp_path, capsys):
    path = tmp_path / "r.yaml"
    path.write_text("seed: 1\nlearning_rat: 3\n")
    assert main(["config", str(path)]) == 2
    err = capsys.readouterr().err
    assert f"{path}:2" in err
    assert "learning_rate" in err


def test_secrets_are_not_shown(capsys):
    assert "hush" not in "\n".join(shown(capsys, "wandb_api_key=hush", "--all"))
