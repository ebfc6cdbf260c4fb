"""Keys of compression as they are typed, each once, and what each of them changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.cli.main import main
from erniekit.demo.tiny import TRAIN, make_tiny_model
from support.jsonl import write_jsonl


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))


def losses(model: Path, output: Path, *words: str) -> list[float]:
    """Of three steps of `erniekit train`."""
    rows = write_jsonl(output.with_suffix(".jsonl"), [json.loads(line) for line in TRAIN.open(encoding="utf-8")][:8])
    usual = ["--max_steps", "3", "--max_seq_len", "96", "--learning_rate", "1e-3", "--fine_tuning", "Full"]
    usual += ["--gradient_accumulation_steps", "1", "--device", "cpu", "--doctor", "off", "--report_to", "none"]
    given = ["--model_name_or_path", str(model), "--data", str(rows), "--output_dir", str(output)]
    assert main(["train", *given, *usual, *words]) == 0
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def quantised(model: Path, output: Path, *words: str) -> dict:
    """The report of `erniekit quantize`, with the config of its result."""
    given = ["--data", str(TRAIN), "--calibration_rows", "4", "--device", "cpu", "--dataset_num_proc", "1"]
    assert main(["quantize", str(model), "--quant", "w4a16", "--output_dir", str(output), *given, *words]) == 0
    config = json.loads((output / "config.json").read_text())
    return {**json.loads((output / "quantize_report.json").read_text()), "config": config["quantization_config"]}


def test_grad_clip_says_which_norm_is_limited(tmp_path: Path) -> None:
    model, words = make_tiny_model(tmp_path / "model"), ["--update_in_backward", "True", "--max_grad_norm", "1e-6"]
    previous, tensor = (losses(model, tmp_path / kind, *words, "--grad_clip", kind) for kind in ("previous", "tensor"))
    assert previous[0] == tensor[0]
    assert previous[1] != tensor[1], "the first step has no previous norm, but each tensor has one of its own"


def test_use_fp8_rounds_every_product(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    plain, rounded = losses(model, tmp_path / "plain"), losses(model, tmp_path / "fp8", "--use_fp8", "True")
    assert rounded[0] == pytest.approx(plain[0], rel=0.02)
    assert rounded[0] != plain[0]


def test_quant_group_size_is_that_of_the_file(tmp_path: Path) -> None:
    found = quantised(make_tiny_model(tmp_path / "model"), tmp_path / "out", "--quant_group_size", "32")
    assert [group["weights"]["group_size"] for group in found["config"]["config_groups"].values()] == [32]


def test_expert_tokens_is_how_many_an_expert_is_topped_up_to(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", family="ernie4_5_moe")
    found = quantised(model, tmp_path / "out", "--expert_tokens", "24")
    assert found["expert_tokens"] == 24
    assert {row["used"] for row in found["topped_up"]} == {24}
