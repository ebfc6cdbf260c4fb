"""`erniekit recipes`: shipped recipes are listed; the data beside them names real ones and claims no run too many."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.cli.main import main
from erniekit.cli.recipes_command import FACTS, _proofs, _row, _run
from erniekit.config import load
from erniekit.recipes.plan_fits import Fitting

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
        row = _row(name, _run(name, EXAMPLES), KNOWN)
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


@pytest.mark.parametrize(
    "words", [["zzz"], ["--fits"], ["--fits", "8 cards"], ["--what"], ["a", "b"], ["xpu", "--flat"]]
)
def test_bad_words_are_three_lines(capsys, words):
    assert main(["recipes", *words]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 3


def test_a_cluster_adds_the_fewest_cards_by_plan_and_whether_it_has_them(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["recipes", "configs/ERNIE-4.5-21B-A3B/", "--fits", "1x80G"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-3:] == ["proven", "planned", "fits"]
    found = {line.split()[0].rpartition("/")[2]: line.split()[-2:] for line in lines[1 : lines.index("")]}
    assert found["run_sft_wint8mix_lora_8k"] == ["1x80G", "yes"]
    assert found["run_sft_8k"][1] == "no"
    assert int(found["run_dpo_32k"][0].partition("x")[0]) > int(found["run_dpo_lora_32k"][0].partition("x")[0])
    assert any(line.startswith("planned ") for line in lines)
    one = listed(capsys, "configs/ERNIE-4.5-0.3B/sft/run_sft_8k", "--fits", "8xA100")
    assert [(row["planned"], row["fits"], row["cards"]) for row in one] == [("1xA100", "yes", "1x80G")]


def test_recipes_of_one_job_are_planned_once_and_a_model_of_no_shape_is_said_so(monkeypatch):
    monkeypatch.chdir(ROOT)
    fits = Fitting("8x80G")
    names = ("ERNIE-4.5-0.3B", "xpu/ERNIE-4.5-0.3B")
    same = [fits(load([f"examples/configs/{name}/sft/run_sft_8k.yaml"])) for name in names]
    assert same[0] == same[1]
    assert fits.planned == 1
    strange = fits(load(["model_name_or_path=somebody/else", "train_dataset_path=x"]))
    assert strange.fits.startswith("not planned: the shape of somebody/else")


@pytest.mark.full
def test_every_recipe_is_planned(capsys):
    rows = listed(capsys, "--fits", "8x80G")
    trained = [row for row in rows if row["method"] != "-"]
    assert len(trained) > 60
    assert all(row["fits"] in ("yes", "no") for row in trained)
    assert all(not row["fits"] for row in rows if row["method"] == "-")


def test_unlike_devices_are_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    file = tmp_path / "islands.yaml"
    file.write_text("islands: [8xH200, 8xBI150]")
    assert main(["recipes", "0.3B", "--fits", str(file)]) == 2
    assert "one kind of device" in capsys.readouterr().err
