"""`erniekit bench --real`: whole training commands, timed from outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentencepiece

from erniekit.bench.real import CASES, chosen, cut, rates, table, tiny, write_model, write_rows
from erniekit.cli.main import main
from erniekit.errors import ConfigError


def test_a_command_is_run_and_timed_from_its_first_line_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["bench", "--real", "--tiny", "--only", "sft", "--output_dir", str(tmp_path), "length_buckets=on"])
    said = capsys.readouterr().out
    assert code == 0, said
    (result,) = json.loads((tmp_path / "real.json").read_text())["results"]
    assert result["steps"] == 4
    assert 0 < result["first_line_s"] <= result["first_step_s"] < result["seconds"]
    parts = result["start_seconds"]
    assert list(parts) == ["plan", "data", "model", "checks", "probe and resume"]
    assert 0 < sum(parts.values()) < result["first_step_s"]
    assert 0 < result["to_the_end_s"] < result["seconds"] - result["first_step_s"]
    assert result["tokens_per_s"] > 0
    assert any("joined, padded to" in line for line in result["rows"])
    assert "| sft " in said


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in CASES if name != "sft"])
def test_every_case_runs_tiny(name: str, tmp_path: Path) -> None:
    assert main(["bench", "--real", "--tiny", "--only", name, "--output_dir", str(tmp_path)]) == 0


@pytest.mark.full
def test_a_command_that_fails_is_told_with_its_last_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--real", "--tiny", "--only", "sft", "--output_dir", str(tmp_path), "lora_rank=none_at_all"]
    assert main(["bench", *words]) == 1
    assert "lora_rank" in capsys.readouterr().out
    (result,) = json.loads((tmp_path / "real.json").read_text())["results"]
    assert result["exit_code"] == 2


def test_rows_have_the_tokens_that_a_case_asks_for(tmp_path: Path) -> None:
    for name in ("sft", "dpo-rows"):
        case, folder = tiny(CASES[name]), tmp_path / name
        write_model(case, folder)
        write_rows(case, folder, tmp_path / f"{name}.jsonl", 20)
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for row in rows:
            parts = [*row["src"], *row["tgt"]] if name == "sft" else row["src"]
            tokens = sum(len(pieces.encode(part)) for part in parts)
            assert 0.4 * case.rows[0] < tokens <= case.rows[1] + 8


def test_a_rate_counts_the_later_steps_and_a_mean_all_but_the_first() -> None:
    records = [dict(tokens_per_second=speed, interval_runtime=1.0) for speed in (1, 10, 50, 100, 102, 98)]
    found = rates(records)
    assert found["tokens_per_s"] == 100
    assert found["all_steps_tokens_per_s"] == 72


def test_unknown_cases_are_refused_and_experts_can_be_cut_to_some_layers() -> None:
    with pytest.raises(ConfigError, match="no case 'stf'"):
        chosen(["stf"])
    assert [case.name for case in chosen([])] == list(CASES)
    short = cut(CASES["lora"], 8)
    assert (short.model["num_hidden_layers"], short.model["moe_layer_end_index"], short.aim) == (8, 7, None)
    assert cut(CASES["sft"], 8) is CASES["sft"]


def test_a_failed_command_has_a_line_of_its_own() -> None:
    *_, row = table([{"case": "sft", "about": "x", "aim": None, "failed": ["no"], "exit_code": 2}])
    assert "failed" in row
