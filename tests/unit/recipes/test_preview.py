"""`erniekit data preview`: rows as the model would see them, at once and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.config import load
from erniekit.recipes.preview import READ, REJECTED, TRAINED, joined, preview, preview_command
from support.jsonl import write_jsonl


def text(row: dict, part: int) -> str:
    return "".join(piece for piece, p in row["pieces"] if p == part)


def test_an_answer_is_trained_and_its_question_read(paddle: Path, root: Path) -> None:
    words = [str(root / "examples/data/sft-train.jsonl"), f"tokenizer_name={paddle / 'tokenizer'}"]
    told = preview(load(words, "data"), 1, 2)
    assert [row["line"] for row in told["rows"]] == [2, 3]
    assert (told["total"], told["format"]) == (200, "erniekit")
    raw = json.loads((root / "examples/data/sft-train.jsonl").read_text().splitlines()[1])
    row = told["rows"][0]
    assert raw["tgt"][0] in text(row, TRAINED)
    assert raw["src"][0] in text(row, READ)
    assert row["trained"] == sum(p != READ for _, p in row["pieces"])


def test_of_a_pair_both_answers_are_marked_apart(paddle: Path, root: Path) -> None:
    file = root / "examples/data/dpo-train.jsonl"
    words = [str(file), f"tokenizer_name={paddle / 'tokenizer'}", "stage=DPO"]
    (row,) = preview(load(words, "data"), 0, 1)["rows"]
    raw = json.loads(file.read_text().splitlines()[0])
    better, worse = sorted(zip(raw["sort"], raw["response"]), reverse=True)
    shown = [text(row, part).strip() for part in (TRAINED, REJECTED)]
    for (_, said), seen in zip((better, worse), shown):
        answer = said[-1] if isinstance(said, list) else said
        assert seen.startswith(answer)


def test_without_a_model_what_is_said_is_shown(root: Path) -> None:
    (row,) = preview(load([str(root / "examples/data/sft-train.jsonl")], "data"), 1, 1)["rows"]
    assert text(row, READ).startswith("user: ")
    assert "assistant: " in text(row, READ), "the role is not learnt"
    raw = json.loads((root / "examples/data/sft-train.jsonl").read_text().splitlines()[1])
    assert text(row, TRAINED) == raw["tgt"][0]
    assert "tokens" not in row


def test_plain_text_is_all_trained_but_its_first_token(paddle: Path, root: Path) -> None:
    words = [str(root / "examples/data/pretrain.jsonl"), f"tokenizer_name={paddle / 'tokenizer'}", "stage=PT"]
    (row,) = preview(load(words, "data"), 0, 1)["rows"]
    assert row["trained"] == row["tokens"] - 1 > 10


def test_rows_run_on_from_file_to_file(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"src": ["{name}{n}"], "tgt": ["x"]}}\n' for n in range(3)))
    cfg = load([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], "data")
    told = preview(cfg, 2, 2)
    assert [(Path(row["file"]).name, row["line"]) for row in told["rows"]] == [("a.jsonl", 3), ("b.jsonl", 1)]
    assert told["total"] == 6
    assert preview(cfg, 6, 2)["rows"] == []


def test_a_row_that_is_not_used_says_why(tmp_path: Path, paddle: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"src": ["a"], "tgt": ["b"]}\n{"src": ["a"]}\n{"src": ["a b c d e f g h"], "tgt": ["c"]}\n')
    cfg = load([str(file), f"tokenizer_name={paddle / 'tokenizer'}", "max_seq_len=12"], "data")
    problems = [row.get("problem", "") for row in preview(cfg, 0, 3)["rows"]]
    assert "tgt" in problems[1]
    assert "fit" in problems[2]


def test_bytes_of_one_letter_are_put_together() -> None:
    split = [("a", 0), ("<0xE4>", 1), ("<0xBD>", 1), ("<0xA0>", 1), ("<0xE4>", 0), ("b", 0)]
    assert joined(split) == [("a", 0), ("你", 1), ("\ufffd", 0), ("b", 0)]


def test_a_format_that_is_given_is_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"src": ["a"], "tgt": ["b"]}\n')
    told = preview(load([str(tmp_path / "a.jsonl"), "train_dataset_type=alpaca"], "data"), 0, 1)
    assert told["format"] == "alpaca"
    assert told["rows"][0]["problem"]


def test_people_see_brackets_where_there_is_no_colour(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preview_command([str(root / "examples/data/sft-train.jsonl"), "--from", "1", "--rows", "1"]) == 0
    said = capsys.readouterr().out
    assert "sft-train.jsonl:2" in said
    assert "assistant: [" in said
    assert "200 rows, erniekit" in said


def test_it_answers_without_torch(root: Path) -> None:
    code = (
        "import sys; from erniekit.cli.main import main\n"
        f"main(['data', 'preview', {str(root / 'examples/data/sft-train.jsonl')!r}, '--json', '--rows', '1'])\n"
        "sys.exit(3 if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["rows"]) == 1


@pytest.mark.parametrize(
    ("stage", "file", "last"),
    [("KTO", "kto-train", TRAINED), ("CLS", "classify-train", TRAINED), ("RM", "dpo-train", REJECTED)],
)
def test_rows_of_stages_that_score_are_shown(root, stage, file, last):
    (row,) = preview(load([str(root / f"examples/data/{file}.jsonl"), f"stage={stage}"], "data"), 0, 1)["rows"]
    assert [part for _, part in row["pieces"] if part != READ][-1] == last


@pytest.mark.parametrize("model", [False, True])
def test_an_answer_to_avoid_is_marked_apart_with_a_model_and_without(model, tmp_path: Path, paddle: Path, capsys):
    file = write_jsonl(
        tmp_path / "judged.jsonl",
        [{"prompt": "a", "completion": "good", "label": True}, {"prompt": "a", "completion": "bad", "label": False}],
    )
    words = [f"tokenizer_name={paddle / 'tokenizer'}", "--length", "64"] if model else []  # as `erniekit data` names it
    assert preview_command([str(file), "stage=KTO", *words]) == 0
    said = capsys.readouterr().out
    assert "[good" in said
    assert "[[bad" in said
