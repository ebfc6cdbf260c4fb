"""The report of what was read: bad rows by file and line, what was dropped and why, lengths and the trained share."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.data import tokenise
from erniekit.data.clean import clean_command
from erniekit.data.report import BadRowsFile, DataReport, total_lines
from erniekit.data.types import IGNORE, RowProblem
from erniekit.errors import DataError
from support.jsonl import small_row, write_jsonl
from support.sources import open_sources


def test_bad_rows_are_all_listed_with_file_line_and_reason(tmp_path, opened):
    rows = [small_row(i) for i in range(200)]
    rows[3], rows[50], rows[199] = "{", {"src": ["x"], "tgt": ["y", "z"]}, {"src": [""], "tgt": ["y"]}
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    listed = tmp_path / "out" / "bad_rows.jsonl"
    source = opened(path, max_bad_fraction=0.02, bad_rows=BadRowsFile(listed))
    told = [json.loads(line) for line in listed.read_text().splitlines()]
    assert [t["line"] for t in told] == [4, 51, 200]
    assert {t["file"] for t in told} == {str(path)}
    assert all(t["kind"] and t["reason"] for t in told)
    report = source.report
    assert (report.rows, report.samples, report.bad_rows) == (200, 197, 3)
    assert sum(report.bad.values()) == 3
    assert any("a.jsonl:4 " in line for line in report.lines())


def test_too_many_bad_rows_stop_the_run_and_raising_the_key_costs_nothing(tmp_path, opened, no_tokenising):
    rows = [small_row(i) if i % 3 else "broken" for i in range(90)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    listed = tmp_path / "bad_rows.jsonl"
    with pytest.raises(DataError) as caught:
        opened(path, bad_rows=BadRowsFile(listed))
    text = str(caught.value)
    assert "30 of 90 rows" in text
    assert "max_bad_fraction" in caught.value.fix
    assert str(listed) in caught.value.fix
    assert text.count("a.jsonl:") == 3, "the others have the same reason"
    assert f"{path}:1 " in text
    assert "and 27 more" in text
    assert len(listed.read_text().splitlines()) == 30
    no_tokenising()
    assert len(opened(path, max_bad_fraction=0.5)) == 60


def test_the_bad_rows_of_several_sources_share_one_file_and_a_clean_run_leaves_none(tmp_path, tokenizer):
    listed = tmp_path / "bad_rows.jsonl"
    paths = [write_jsonl(tmp_path / name, [small_row(1), "broken"]) for name in ("a.jsonl", "b.jsonl")]
    options = {
        "max_seq_len": 96,
        "cache_dir": tmp_path / "cache",
        "max_bad_fraction": 1,
        "bad_rows": BadRowsFile(listed),
    }
    for _ in range(2):
        opened = open_sources(paths, [None, "erniekit"], tokenizer, **options)
        told = [json.loads(line)["file"] for line in listed.read_text().splitlines()]
        assert told == [str(path) for path in paths]
    assert len(total_lines([s.report for s in opened])) == 1
    open_sources([write_jsonl(tmp_path / "c.jsonl", [small_row(1)])], [None], tokenizer, **options)
    assert not listed.exists()


def test_an_unexpected_error_in_a_row_is_a_bad_row_not_the_end(tmp_path, opened, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [small_row(i) for i in range(10)])
    real = tokenise.parse

    def odd(raw, line, *rest):
        if line == 4:
            raise ZeroDivisionError("surprise")
        return real(raw, line, *rest)

    monkeypatch.setattr(tokenise, "parse", odd)
    source = opened(path, max_bad_fraction=0.5)
    assert len(source) == 9
    assert source.report.first_bad == [
        RowProblem(str(path), 4, "error", "a fault of erniekit: ZeroDivisionError: surprise")
    ]


def test_what_was_dropped_is_counted_by_reason(tmp_path, opened):
    long = " ".join(["river"] * 200)
    rows = [
        small_row(1),
        {"src": ["a"], "tgt": [long]},
        {"src": ["river stone"], "tgt": ["the harbor"], "label": [0]},
        {"src": [long, "and now?"], "tgt": ["the first", "the second"]},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    report = opened(path).report
    assert report.samples == 2
    assert report.dropped == {"overlong": 1, "untrained": 1}
    assert report.dropped_turns == 1
    assert [p.line for p in report.first_dropped] == [2, 3]
    cut = opened(path, overlong="truncate").report
    assert cut.dropped == {"untrained": 1}
    assert cut.truncated_tokens > 100
    assert any("1 older turn and " in line for line in cut.lines())


def test_the_report_measures_lengths_and_the_trained_share(tmp_path, opened):
    source = opened(write_jsonl(tmp_path / "a.jsonl", [small_row(i) for i in range(300)]))
    report, lengths = source.report, source.lengths
    assert report.tokens == lengths.sum()
    assert report.lengths == {
        "min": lengths.min(),
        "median": int(np.percentile(lengths, 50)),
        "p95": int(np.percentile(lengths, 95)),
        "max": lengths.max(),
    }
    assert sum(n for _, n in report.histogram) == 300
    for top, count in report.histogram:
        assert count == ((lengths <= top) & (lengths > top // 2)).sum()
    assert report.trained_tokens == sum(int((source.sample(i).labels != IGNORE).sum()) for i in range(300))
    assert 0 < report.trained_share < 1
    assert json.loads(json.dumps(report.to_dict()))["samples"] == 300


def test_repeated_rows_near_empty_answers_and_the_encoding_are_counted(tmp_path, opened):
    rows = [{"src": ["你好吗？这是问题"], "tgt": ["很好，谢谢。"]}, {"src": ["x"], "tgt": ["N/A"]}] * 2
    path = tmp_path / "a.jsonl"
    path.write_bytes("\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode("gbk"))
    for _ in range(2):  # as made, and as kept beside the cache
        report = opened(path).report
        assert (report.duplicates, report.first_duplicates) == (2, [(3, 1), (4, 2)])
        assert (report.near_empty, report.first_near_empty) == (2, [2, 4])
        assert "GB18030" in report.encoding
    said = "\n".join(report.lines())
    assert "duplicates: 2 rows" in said
    assert "near-empty answers: 2 rows (row 2, 4)" in said
    assert "encoding: GB18030" in said


def test_bad_rows_with_one_reason_are_quoted_three_times(tmp_path) -> None:
    report = DataReport("a.jsonl", "erniekit", rows=10, bad={"empty_text": 8, "wrong_type": 1})
    report.first_bad = [RowProblem("a.jsonl", n, "empty_text", "`tgt[0]` is empty") for n in range(1, 9)]
    report.first_bad.append(RowProblem("a.jsonl", 9, "wrong_type", "`src` is a number"))
    with pytest.raises(DataError) as error:
        report.check(0.0, tmp_path / "bad_rows.jsonl")
    assert error.value.where.count("`tgt[0]` is empty") == 3
    assert "a.jsonl:9  wrong_type" in error.value.where
    assert error.value.where.endswith("and 5 more")


def cut_array(folder: Path) -> Path:
    path = folder / "a.json"
    path.write_text(json.dumps([small_row(i) for i in range(3000)])[:-40])
    return path


def cut_gzip(folder: Path) -> Path:
    packed = gzip.compress("\n".join(json.dumps(small_row(i)) for i in range(3000)).encode())
    path = folder / "a.jsonl.gz"
    path.write_bytes(packed[: len(packed) // 2])
    return path


def joined_arrays(folder: Path) -> Path:
    path = folder / "a.json"
    path.write_text(json.dumps([small_row(i) for i in range(2000)]) + json.dumps([small_row(1)]))
    return path


def open_quote(folder: Path) -> Path:
    path = folder / "a.csv"
    path.write_text("prompt,completion\n" + "q,a\n" * 2000 + '"q,a\n' + "q,a\n" * 500)
    return path


def many_blank_lines(folder: Path) -> Path:
    row = json.dumps(small_row(1)) + "\n"
    path = folder / "a.jsonl"
    path.write_text(row * 1500 + "\n" * 100_001 + row)
    return path


@pytest.mark.parametrize("broken", [cut_array, cut_gzip, joined_arrays, open_quote, many_blank_lines])
def test_a_file_that_breaks_off_stops_the_run_however_small_its_share_unless_all_bad_rows_are_taken(
    tmp_path: Path, opened: Any, broken: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path, listed = broken(tmp_path), tmp_path / "bad_rows.jsonl"
    with pytest.raises(DataError, match=r"cannot be read to its end; [\d,]+ rows before were") as caught:
        opened(path, max_bad_fraction=0.01, bad_rows=BadRowsFile(listed))
    assert f"{path}:" in caught.value.where
    assert len(listed.read_text().splitlines()) == 1
    assert len(opened(path, max_bad_fraction=1)) > 1000
    copy = tmp_path / "copy.jsonl"
    with pytest.raises(DataError, match="cannot be read to its end"):
        clean_command([str(path), "--output", str(copy), "--drop-bad"])
    assert not copy.exists()
