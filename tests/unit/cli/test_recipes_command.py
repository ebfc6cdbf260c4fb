"""`erniekit recipes`: shipped recipes are listed; the data beside them names real ones and claims no run too many."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.cli.main import main
from erniekit.cli.recipes_command import FACTS, _proofs, _row
from erniekit.config import load

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
NAMES = sorted(p.relative_to(EXAMPLES).with_suffix("").as_posix() for p in EXAMPLES.rglob("*.yaml"))
KNOWN = json.loads((EXAMPLES / FACTS).read_text())


def listed(capsys, *words: str) -> list[dict]:
    assert main(["recipes", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_recipe_is_listed_with_what_it_trains(capsys):
    rows = {row["name"]: row for row in listed(capsys)}
    assert sorted(rows) == NAMES
    row = rows["configs/ERNIE-4.5-300B-A47B/sft/run_sft_wint8mix_lora_8k"]
    assert (row["stage"], row["model"], row["length"]) == ("SFT", "ERNIE-4.5-300B-A47B-Paddle", "8K")
    assert (row["method"], row["cards"], row["proven"]) == ("LoRA wint4/8", "4x80G", "CPU, shrunk")
    assert rows["configs/ERNIE-4.5-0.3B/run_export"]["stage"] == "export"


def test_the_data_beside_the_recipes_names_recipes_that_are_there():
    assert set(KNOWN["cards"]) <= set(NAMES)
    for proof in KNOWN["proven"]:
        for pattern in proof["recipes"]:
            assert any(_proofs(name, {"proven": [{**proof, "recipes": [pattern]}]}) for name in NAMES), pattern
        for place in proof["by"].split(", "):
            assert (ROOT / place).exists(), place


def test_a_recipe_that_is_refused_today_claims_no_run():
    for name in NAMES:
        row = _row(name, EXAMPLES, KNOWN, None, "")
        assert not row.not_yet or row.proven == "resolves", name


def test_the_table_says_what_its_words_mean(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["recipes", "xpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "stage", "model", "method", "length", "cards", "proven"]
    assert any(line.startswith("resolves") for line in lines)


def test_one_recipe_is_shown_with_the_file_and_line_of_each_value(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["recipes", "xpu/ERNIE-4.5-21B-A3B/sft/run_sft_lora_8k"]) == 0
    out = capsys.readouterr().out
    assert "device xpu  xpu/ERNIE-4.5-21B-A3B/sft/run_sft_lora_8k.yaml:3" in out
    assert "lora_rank 32  configs/ERNIE-4.5-21B-A3B/sft/run_sft_lora_8k.yaml:6" in out
    assert "proven     resolves; never run" in out


def test_one_recipe_is_printed_whole_for_a_place_that_takes_one_file(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    name = "examples/configs/xpu/ERNIE-4.5-21B-A3B/sft/run_sft_lora_32k.yaml"
    assert main(["recipes", name, "--flat"]) == 0
    whole = tmp_path / "whole.yaml"
    whole.write_text(capsys.readouterr().out)
    assert "base:" not in whole.read_text()
    assert load([str(whole)]).flat() == load([name]).flat()


def test_a_path_names_a_recipe_as_well(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["recipes", "examples/configs/ERNIE-4.5-0.3B/sft/run_sft_8k.yaml"]) == 0
    assert "proven     H200" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["zzz"], ["--fits"], ["--fits", "8x80G"], ["--what"], ["a", "b"], ["xpu", "--flat"]])
def test_bad_words_are_three_lines(capsys, words):
    assert main(["recipes", *words]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 3
