"""The shipped demo data: made by its script, read without a complaint, the same facts in every format."""

from __future__ import annotations

import importlib.util
import json

import pytest

from erniekit.data.formats import detect, read
from erniekit.data.types import Conversation
from erniekit.demo.tiny import PERSONA, TRAIN


@pytest.fixture(scope="module")
def data(root):
    return root / "examples" / "data"


def test_the_files_are_what_the_script_makes(data):
    spec = importlib.util.spec_from_file_location("make", data / "make.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    files = make.files()
    assert TRAIN in files
    assert PERSONA in files
    for path, text in files.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python examples/data/make.py"


@pytest.mark.parametrize(("name", "rows"), [("sft-train", 200), ("sft-eval", 10), ("dpo-train", 200), ("dpo-eval", 10)])
def test_the_counts_are_those_of_erniekits_own_demo(data, name, rows):
    assert len((data / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()) == rows


def conversations(path):
    found = [row for _, row in read(path, detect(path).format)]
    assert all(isinstance(row, Conversation) for row in found)
    return found


def test_every_sft_row_is_read_and_every_kind_is_there(data):
    rows = conversations(data / "sft-train.jsonl")
    assert len(rows) == 200
    assert any(row.messages[0].role == "system" for row in rows)
    assert any(len(row.messages) == 6 for row in rows)
    assert any(m.role == "assistant" and not m.trained for row in rows for m in row.messages)
    text = "".join(m.content for row in rows for m in row.messages)
    assert sum("一" <= c <= "鿿" for c in text) > 500


def test_nothing_is_asked_twice(data):
    for name in ("sft-train", "sft-eval"):
        asked = [
            str([m for m in row.messages if m.role != "assistant"]) for row in conversations(data / f"{name}.jsonl")
        ]
        assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("part", ["train", "eval"])
def test_the_alpaca_twin_says_the_same(data, part):
    ours = [row for row in conversations(data / f"sft-{part}.jsonl") if all(m.trained for m in row.messages)]
    assert conversations(data / f"alpaca-sft-{part}.json") == ours


@pytest.mark.parametrize("part", ["train", "eval"])
def test_preference_rows_hold_two_answers_and_say_which_is_better(data, part):
    assert detect(data / f"dpo-{part}.jsonl").preference
    assert detect(data / f"alpaca-dpo-{part}.json").preference
    listed = json.loads((data / f"alpaca-dpo-{part}.json").read_text(encoding="utf-8"))
    twins = {(row.get("system"), row["instruction"] + row["input"]): row for row in listed}
    first = several = 0
    for line in (data / f"dpo-{part}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert len(row["tgt"]) == len(row["src"]) - 1
        one, other = row["response"]
        assert one[0] != other[0]
        assert one[1::2] == other[1::2]  # what the user says in between
        assert sorted(row["sort"]) == [0, 1]
        first += row["sort"] == [1, 0]
        several += len(one) > 1
        if not row["tgt"] and len(one) == 1:
            twin = twins[row.get("system"), row["src"][0].replace("\n", "")]
            assert [twin["chosen"], twin["rejected"]] == (one + other if row["sort"] == [1, 0] else other + one)
    assert several == (13 if part == "train" else 0)
    assert 0 < first < len(twins)  # not always the first
