"""A run on rows with thoughts and unknown fields: both are in its first lines and in run.json, and the key acts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from erniekit.data.tokenizer import load_tokenizer
from erniekit.recipes.preview import preview_command
from support.jsonl import write_jsonl


@pytest.fixture
def thinking(tmp_path: Path) -> Path:
    answer = {"role": "assistant", "content": "the copper lantern", "reasoning_content": "the quiet river", "name": "x"}
    asked = [{"role": "user", "content": f"the harbor {i}?"} for i in range(8)]
    return write_jsonl(tmp_path / "rows.jsonl", [{"messages": [q, answer], "score": 3} for q in asked])


def test_a_run_on_thinking_rows_says_what_it_does_with_them(
    train: Callable, thinking: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    train(tmp_path / "all", train_dataset_path=thinking, max_steps=1)
    told = capsys.readouterr().out
    assert "thoughts: 8 of 8 answers that think" in told
    assert "fields not used: `messages[].name` in 8 rows, `score` in 8 rows" in told
    train(tmp_path / "mask", train_dataset_path=thinking, max_steps=1, train_thinking="mask")
    reports = [json.loads((tmp_path / name / "run.json").read_text())["data"]["train"][0] for name in ("all", "mask")]
    for report in reports:
        assert report["unused"] == {"messages[].name": 8, "score": 8}
        assert report["bad"] == {}
        assert report["thoughts_in"] == 8
    assert reports[0]["trained_tokens"] - reports[1]["trained_tokens"] == reports[0]["thought_tokens"] > 8 * 4


@pytest.mark.parametrize(("rule", "trained"), [("all", True), ("mask", False)])
def test_the_preview_shows_the_thought_and_whether_it_is_trained(
    rule: str, trained: bool, thinking: Path, tiny_model: Path, capsys: pytest.CaptureFixture
) -> None:
    words = [str(thinking), f"model_name_or_path={tiny_model}", f"train_thinking={rule}", "--rows", "1", "--json"]
    assert preview_command(words) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    text = {part: "".join(piece for piece, p in row["pieces"] if p == part) for part in (0, 1)}
    assert load_tokenizer(tiny_model).chat_template is not None
    assert ("the quiet river" in text[1]) is trained
    assert ("the quiet river" in text[0]) is not trained
    assert "the copper lantern" in text[1]
    assert row["unused"] == ["score", "messages[].name"]
    assert preview_command([*words[:-1], "--rows", "1"]) == 0
    out = capsys.readouterr().out
    assert "the quiet river" in out
    assert "fields not used: `score`, `messages[].name`" in out
    assert preview_command([str(thinking), "--rows", "1"]) == 0  # without a model
    assert "<think>\n  the quiet river\n  </think>" in capsys.readouterr().out
