"""Cleaned copies: what goes, why, and that nothing that exists is touched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.data.clean import clean_command
from erniekit.data.inspect import data_command
from erniekit.data.overlap import words_of
from erniekit.errors import ConfigError, DataError
from support.jsonl import write_jsonl

TEST = "The quick brown fox jumps over the lazy dog while seven owls watch it."
ROWS = [
    {"question": "a?", "answer": "b", "id": 1},
    {"question": "a?", "answer": "b", "id": 2},
    {"question": "a?", "answer": "b ", "id": 3},
    {"question": "c?", "answer": "...", "id": 4},
    {"question": f"Translate: {TEST.upper()}", "answer": "Der Fuchs.", "id": 5},
    {"question": "翻译：床前明月光，疑是地上霜。举头望明月，低头思故乡。", "answer": "ok", "id": 6},
]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str, Path]:
    evaluation = [
        {"question": TEST, "answer": "x y z"},
        {"question": "床前明月光疑是地上霜举头望明月", "answer": "李白"},
    ]
    return (
        str(write_jsonl(tmp_path / "train.jsonl", ROWS)),
        str(write_jsonl(tmp_path / "eval.jsonl", evaluation)),
        tmp_path / "clean.jsonl",
    )


def kept(path: Path) -> list[int]:
    return [json.loads(line)["id"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_kind_of_row_goes_when_asked_and_is_listed_with_its_line(files, capsys) -> None:
    train, evaluation, output = files
    assert clean_command([train, "--output", str(output), "--dedup", "--near-empty", "--against", evaluation]) == 0
    assert kept(output) == [1, 3]
    said = capsys.readouterr().out
    assert f"{train}:2: duplicate: has the content of {train}:1" in said
    assert f"{train}:4: near-empty" in said
    assert f"{train}:5: in the evaluation file: shares `the quick brown fox" in said
    assert f"{evaluation}:2" in said
    listed = [json.loads(line) for line in (output.parent / "clean.removed.jsonl").read_text().splitlines()]
    assert [row["where"].rpartition(":")[2] for row in listed] == ["2", "4", "5", "6"]


def test_only_what_was_asked_goes_and_longer_runs_may_be_asked_for(files) -> None:
    train, evaluation, output = files
    clean_command([train, "--output", str(output), "--against", evaluation, "--ngram", "50"])
    assert kept(output) == [1, 2, 3, 4]  # texts of fewer words are compared whole
    other = output.with_name("other.jsonl")
    clean_command([train, "--output", str(other), "--dedup"])
    assert kept(other) == [1, 3, 4, 5, 6]
    twice = output.with_name("twice.jsonl")
    clean_command([train, train, "--output", str(twice), "--dedup"])
    assert kept(twice) == [1, 3, 4, 5, 6]


def test_nothing_that_exists_is_replaced_and_half_a_copy_is_none(files) -> None:
    train, _, output = files
    output.write_text("mine")
    with pytest.raises(DataError, match="exists and is not replaced"):
        clean_command([train, "--output", str(output), "--dedup"])
    assert output.read_text() == "mine"
    bad = write_jsonl(output.with_name("bad.jsonl"), [ROWS[0], b"{", ROWS[3]])
    new = output.with_name("new.jsonl")
    with pytest.raises(DataError, match="bad row"):
        clean_command([str(bad), "--output", str(new), "--dedup"])
    assert not new.exists()
    clean_command([str(bad), "--output", str(new), "--drop-bad"])
    assert kept(new) == [1, 4]


def test_a_copy_without_rows_is_warned_of(tmp_path: Path, capsys) -> None:
    empty = write_jsonl(tmp_path / "empty.jsonl", [{"question": "a?", "answer": "..."}] * 2)
    assert clean_command([str(empty), "--near-empty", "--output", str(tmp_path / "new.jsonl")]) == 0
    assert "no row is left" in capsys.readouterr().err


def test_a_call_that_asks_for_nothing_is_refused(files) -> None:
    train, _, output = files
    with pytest.raises(ConfigError, match="nothing to clean"):
        clean_command([train, "--output", str(output)])
    with pytest.raises(ConfigError, match=r"\.jsonl"):
        clean_command([train, "--output", "copy.csv", "--dedup"])


def test_a_table_is_copied_as_jsonl_with_its_own_columns(files, tmp_path: Path) -> None:
    _, _, output = files
    table = tmp_path / "a.csv"
    table.write_text("q,a,id\nx?,y,1\nx?,y,2\n", encoding="gbk")
    clean_command([str(table), "--output", str(output), "--dedup", "--columns", "prompt=q,response=a"])
    assert [json.loads(line) for line in output.read_text().splitlines()] == [{"q": "x?", "a": "y", "id": "1"}]


def test_columns_may_be_given_as_for_the_data_command(files, tmp_path: Path) -> None:
    _, _, output = files
    table = tmp_path / "a.csv"
    table.write_text("q,a\nx?,y\nx?,y\n", encoding="utf-8")
    clean_command([str(table), "--output", str(output), "--dedup", "columns.prompt=q", "columns.response=a"])
    assert len(output.read_text().splitlines()) == 1
    with pytest.raises(ConfigError, match="unknown key 'max_seq_len'") as caught:
        clean_command([str(table), "--output", "x=y.jsonl", "--dedup", "max_seq_len=5"])
    assert caught.value.where == "erniekit data clean"


def test_words_ignore_case_and_punctuation_and_divide_chinese() -> None:
    assert words_of("The Cat's 3 cats, 山水x") == ["the", "cat", "s", "3", "cats", "山", "水", "x"]


def test_the_data_command_shows_lengths_repeats_and_takes_the_keys_of_its_help(files, capsys, tmp_path) -> None:
    train, _, _ = files
    assert data_command([train]) == 0
    said = capsys.readouterr().out
    assert "characters a row: min 3, median" in said
    assert "duplicates: 1 row repeats an earlier one (row 2 = 1)" in said
    assert "near-empty answers: 1 row (row 4)" in said
    assert "fields not used: `id` in 6 rows" in said
    table = tmp_path / "a.csv"
    table.write_bytes("q,a\n中国的首都在哪里？,北京，就是北京。\n".encode("gbk"))
    assert (
        data_command([str(table), "columns.prompt=q", "columns.response=a", "train_dataset_type=prompt_completion"])
        == 0
    )
    assert "encoding: GB18030" in capsys.readouterr().out
    assert data_command([str(table), "--columns", "prompt=q,response=a"]) == 0
    with pytest.raises(ConfigError, match="unknown key 'max_seq_length'") as refused:
        data_command([train, "max_seq_length=3"])
    assert "did you mean max_seq_len?" in refused.value.fix


def test_the_data_command_counts_tokens_with_a_model(files, capsys, paddle: Path) -> None:
    train, _, _ = files
    assert data_command([train, "--model", str(paddle / "tokenizer"), "max_seq_len=40"]) == 0
    said = capsys.readouterr().out
    assert "tokens an example: min" in said
    assert "longer than 40 tokens: 2 rows (row 5, 6)" in said


def test_files_of_several_formats_are_not_copied_into_one(files, tmp_path: Path, capsys) -> None:
    train, _, output = files
    other = write_jsonl(tmp_path / "other.jsonl", [{"instruction": "x", "output": "y"}])
    with pytest.raises(DataError, match="one copy holds one format") as refused:
        clean_command([train, str(other), "--output", str(output), "--dedup"])
    assert "one by one" in refused.value.fix
    assert not output.exists()
    assert clean_command([str(other), "--output", str(output), "--dedup"]) == 0
    assert "1 row; none left out\n" in capsys.readouterr().out


def test_a_file_that_cannot_be_read_does_not_hide_the_others(files, tmp_path: Path, capsys) -> None:
    (tmp_path / "odd.csv").write_text("p,q\n1,2\n")
    (tmp_path / "void.jsonl").touch()
    assert data_command([str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert "cannot detect the dataset format: rows have `p`, `q`" in told.out
    assert "train.jsonl: prompt_completion" in told.out  # which comes after it
    assert "not read: void.jsonl (empty)" in told.err
    with pytest.raises(DataError, match="cannot detect"):
        data_command([str(tmp_path / "odd.csv")])


def test_rows_are_compared_as_the_stage_reads_them(tmp_path: Path) -> None:
    judged = [
        {"id": 1, "prompt": "a", "completion": "b", "label": False},
        {"id": 2, "prompt": "a", "completion": "b", "label": True},
        {"id": 3, "prompt": "a", "completion": "b", "label": True},
    ]
    file = str(write_jsonl(tmp_path / "judged.jsonl", judged))
    for stage in ("SFT", "KTO"):  # a verdict, or what is learnt: rows that differ in it are both kept
        clean_command([file, "--output", str(tmp_path / f"{stage}.jsonl"), "--dedup", f"stage={stage}"])
        assert kept(tmp_path / f"{stage}.jsonl") == [1, 2]
    classes = [
        {"id": 1, "text": "a", "label": 0},
        {"id": 2, "text": "a", "label": 0},
        {"id": 3, "text": "a", "label": 1},
    ]
    file = str(write_jsonl(tmp_path / "classes.jsonl", classes))
    clean_command([file, "--output", str(tmp_path / "CLS.jsonl"), "--dedup"])
    assert kept(tmp_path / "CLS.jsonl") == [1, 3]


def test_a_mistyped_flag_is_an_error_of_three_lines(files) -> None:
    train, _, output = files
    with pytest.raises(ConfigError) as error:
        clean_command([train, "--output", str(output), "--near-emty"])
    assert "did you mean --near-empty?" in error.value.fix
    with pytest.raises(ConfigError, match="required: --output"):
        clean_command([train, "--dedup"])


def test_a_killed_copy_leaves_nothing_under_its_name(files) -> None:
    train, _, output = files
    code = (
        "import os, sys; from erniekit.data import clean\n"
        "clean._publish = lambda *_: os.kill(os.getpid(), 9)\n"  # all is written, nothing has its name yet
        "clean.clean_command(sys.argv[1:])"
    )
    words = [train, "--output", str(output), "--dedup"]
    assert subprocess.run([sys.executable, "-c", code, *words], capture_output=True).returncode == -9
    assert not output.exists()
    assert clean_command(words) == 0, "what is left of it is in nobody's way"
    assert kept(output) == [1, 3, 4, 5, 6]
