"""Rows of every stage as `erniekit data` shows them, with and without the stage's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.data import inspect
from erniekit.data.inspect import data_command
from erniekit.data.stage_rows import stage_rows
from erniekit.data.types import RowProblem
from erniekit.errors import CheckpointError, DataError
from support.jsonl import write_jsonl


def shown(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> str:
    assert data_command([str(word) for word in words]) == code
    return capsys.readouterr().out


def test_judged_answers_and_classes_are_counted(root: Path, capsys) -> None:
    said = shown(capsys, root / "examples/data/kto-eval.jsonl", "stage=KTO")
    assert "unpaired (for `stage: KTO`)" in said
    assert "9 judged answers" in said
    assert "5 answers are desirable, 4 are not" in said
    said = shown(capsys, root / "examples/data/classify-eval.jsonl")
    assert "rows have `text` and `label`: for `stage: CLS`" in said
    assert "classes: en 7, zh 3" in said


def test_text_is_shown_as_the_documents_of_pre_training(tmp_path: Path, paddle: Path, capsys) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    write_jsonl(tmp_path / "b.jsonl", [{"text": "four"}])
    for words in ([tmp_path / "a.txt"], [tmp_path, "stage=PT"]):
        said = shown(capsys, *words, "--model", paddle / "tokenizer", "--length", "1")
        assert "2 rows, 2 documents" in said
        assert "longer than" not in said, "documents are divided, none is left out"
    assert "1 row, 1 document," in shown(capsys, tmp_path / "b.jsonl")
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(DataError, match="no dataset file") as error:
        data_command([str(tmp_path)])
    assert "stage: PT" in error.value.fix


def test_a_row_that_the_stage_cannot_read_is_a_bad_row(tmp_path: Path) -> None:
    file = str(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b", "label": "perhaps"}, {"text": 3}]))
    for stage in ("KTO", "CLS", "PT"):
        found = stage_rows(file, stage)
        assert all(isinstance(found.read(raw, line), RowProblem) for line, raw in found.rows())
    with pytest.raises(DataError, match="hold no preference pairs"):
        stage_rows(file, "DPO")


def test_a_wrong_folder_is_answered_in_a_few_lines(tmp_path: Path, capsys) -> None:
    for n in range(20):
        (tmp_path / f"{n:02}.json").write_text('{\n "a": 1\n}')
    said = shown(capsys, tmp_path, code=2)
    assert said.count("the file is one JSON object with `a`") == 3
    assert "17 more files cannot be read as data" in said
    assert len(said.splitlines()) < 15


@pytest.mark.parametrize(
    ("name", "content", "what", "fix"),
    [
        ("a.json", '{\n "data": [{"q": 1}],\n "version": 2}', "one JSON object with `data`, `version`", "jq .data"),
        ("a.jsonl", '{"foo": 1}', "rows have `foo`", "name the columns"),
        ("a.jsonl", "no json", "line 1 is not JSON: Expecting value (column 1)", "write one JSON object on each line"),
        ("a.jsonl", "\n{'src': ['a'], 'tgt': ['b']}\n", "line 2 is not JSON: Expecting property name", "json.dumps"),
        ("a.jsonl", '{"src": "a", "tgt": "b"},\n', "line 1 is not JSON: Extra data", "without a comma after it"),
        ("a.csv", "src,tgt\n\xe9t\xe9,ao\xfbt\n", "dataset is not UTF-8 text", "save it as UTF-8"),
    ],
)
def test_what_a_file_holds_instead_of_rows_is_said(tmp_path: Path, name: str, content: str, what: str, fix: str):
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(DataError) as error:
        data_command([str(tmp_path / name)])
    assert what in error.value.what
    assert fix in error.value.fix


def test_the_tokenizer_is_loaded_once_for_all_files(
    tmp_path: Path, paddle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Path] = []
    usual = inspect.load_tokenizer
    monkeypatch.setattr(inspect, "load_tokenizer", lambda folder: (loaded.append(folder), usual(folder))[1])
    files = [write_jsonl(tmp_path / f"{k}.jsonl", [{"src": ["a"], "tgt": ["b"]}]) for k in range(3)]
    assert shown(capsys, *files, "--model", paddle / "tokenizer").count("tokens") == 3
    assert loaded == [paddle / "tokenizer"]
    with pytest.raises(CheckpointError, match="no tokenizer in absent"):
        data_command([*map(str, files), "--model", str(tmp_path / "absent")])
    assert capsys.readouterr().out == ""
