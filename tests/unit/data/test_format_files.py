"""Every file kind, whole, long or damaged: rows by line number, a Problem for what is not one, little memory."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest

from erniekit.data.formats import detect, parse, read, rows
from erniekit.data.types import RowProblem
from erniekit.errors import ConfigError, DataError
from support.clock import within
from support.jsonl import write_jsonl
from support.memory import MEMORY

ROW = {"src": ["q1", "q2"], "tgt": ["a1", "a2"]}


def outcomes(path: Path, format: str = "erniekit") -> list[tuple[int, str]]:
    return [(line, x.kind if isinstance(x, RowProblem) else "ok") for line, x in read(path, format)]


def memory_to_read(*paths: Path) -> float:
    """MiB that a fresh process needs on top of its imports."""
    code = (
        f"import sys; from erniekit.data.formats import read\n{MEMORY}\n"
        "before = memory()\n"
        "for path in sys.argv[1:]: print(sum(1 for _ in read(path, 'erniekit')), end=' ')\n"
        "print((memory() - before) / 2**20)"
    )
    done = subprocess.run([sys.executable, "-c", code, *map(str, paths)], capture_output=True, text=True, check=True)
    *counts, grown = done.stdout.split()
    assert all(int(count) > 1 for count in counts)
    return float(grown)


def test_lines_keep_their_numbers_through_blanks_bom_and_crlf(tmp_path: Path) -> None:
    row = json.dumps(ROW).encode()
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + row + b"\r\n\r\n\n" + row + b"\n{\n" + row)
    assert outcomes(path) == [(1, "ok"), (4, "ok"), (5, "bad_json"), (6, "ok")]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le"])
def test_a_byte_order_mark_may_stand_before_any_line_as_in_joined_files(tmp_path: Path, encoding: str) -> None:
    row = json.dumps(ROW)
    path = tmp_path / "a.jsonl"
    joined = f"\ufeff{row}\n{row}\n\ufeff{row}\r\n\ufeff\n\ufeff\ufeff {row}\n{row}\ufeff{row}\n"
    path.write_bytes(joined.encode(encoding))
    # The last line holds two rows: the file before it had no end of line.
    assert outcomes(path) == [(1, "ok"), (2, "ok"), (3, "ok"), (5, "ok"), (6, "bad_json")]


def test_damaged_lines_are_problems_and_the_rest_is_read(tmp_path: Path) -> None:
    good = json.dumps(ROW).encode()
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [
            good,
            b'{"src": ["a\x00"], "tgt": ["b"]}',
            b"\x00\x00",
            b'{"src": ["\xff"], "tgt": ["b"]}',
            b"[" * 100_000,
            b'{"src": ["a"], "tgt": ["b"], "n": ' + b"9" * 5000 + b"}",
            b'{"src": ["a"], "tgt": ["b"], "n": NaN}',
            b'{"src": ["\\u0000"], "tgt": ["b"]}',
            good[:-5],
        ],
    )
    assert [kind for _, kind in outcomes(path)] == [
        "ok",
        "bad_json",
        "bad_json",
        "bad_utf8",
        "deep_nesting",
        "bad_json",
        "ok",
        "ok",
        "bad_json",
    ]


def test_a_row_over_the_limit_is_a_problem_in_lines_and_arrays(tmp_path: Path) -> None:
    big = {"src": ["x" * 3_000_000], "tgt": ["b"]}
    lines = write_jsonl(tmp_path / "a.jsonl", [ROW, big, ROW])
    array = tmp_path / "a.json"
    array.write_text(json.dumps([ROW, big, ROW]))
    for path in (lines, array):
        found = [raw.kind if isinstance(raw, RowProblem) else "row" for _, raw in rows(path, max_row_bytes=1_000_000)]
        assert found == ["row", "row_too_long", "row"]
        assert [number for number, _ in rows(path)] == [1, 2, 3]


def test_a_hundred_megabyte_line_is_passed_over_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"src": ["')
        for _ in range(100):
            file.write(b"x" * (1 << 20))
        file.write(b'"], "tgt": ["b"]}\n' + json.dumps(ROW).encode() + b"\n")
    assert outcomes(path) == [(1, "row_too_long"), (2, "ok")]
    assert memory_to_read(path) < 160  # MiB: one 64 MiB row, and the copy readline makes of it


def test_arrays_gz_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    from pyarrow import Table, parquet

    many = [{"src": [f'q{i} \\" [}} 河'], "tgt": ["a" * i]} for i in range(1, 300)]
    text = "\n".join(map(json.dumps, many)) + "\n"
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "b.json").write_text(json.dumps(many, indent=1, ensure_ascii=False))
    (tmp_path / "c.json").write_text(text)
    (tmp_path / "d.jsonl").write_text(json.dumps(many, indent=1))
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "f.json.gz").write_bytes(gzip.compress(json.dumps(many).encode()))
    parquet.write_table(Table.from_pylist(many), tmp_path / "g.parquet")
    want = list(read(tmp_path / "a.jsonl", "erniekit"))
    assert len(want) == 299
    for path in sorted(tmp_path.iterdir()):
        assert list(read(path, "erniekit")) == want, path.name


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.txt", "rows.jsonl.gz"])
def test_an_array_in_one_line_of_a_file_of_lines_is_told_with_what_makes_rows_of_it(tmp_path: Path, name: str) -> None:
    text = json.dumps([ROW, ROW]).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    with pytest.raises(DataError) as refused:
        detect(path)
    assert refused.value.what.endswith(": its first row is an array, in which rows have `src` (a list), `tgt` (a list)")
    assert refused.value.where == str(path)
    assert "ends in .json; or write one object per line: jq -c '.[]' FILE > rows.jsonl" in refused.value.fix
    [(_, problem)] = read(path, "alpaca")
    assert isinstance(problem, RowProblem)
    assert problem.reason.endswith("not a list of objects: an array of rows, which is read where the name of its file "
                                   "ends in .json")  # fmt: skip
    whole = tmp_path / "rows.json"
    whole.write_text(json.dumps([ROW, ROW]))
    assert len(list(read(whole, detect(whole).format))) == 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_a_file_of_no_bytes_is_called_empty_and_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(DataError) as refused:
        detect(tmp_path / name)
    assert refused.value.what == "the dataset file is empty, 0 bytes"
    assert refused.value.where == str(tmp_path / name)


def test_arrays_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from erniekit.data.formats import files

    many = [{"src": ['q\u2028\\"[{,🙂'], "tgt": ["a" * n], "n": [n, {"x": None}, -1.5e-7, True]} for n in range(1, 40)]
    path = tmp_path / "a.json"
    for text in (json.dumps(many), json.dumps(many, ensure_ascii=False, indent=2)):
        path.write_text(text, encoding="utf-8")
        for size in (1, 7, 64):
            monkeypatch.setattr(files, "_CHUNK", size)
            assert [raw for _, raw in rows(path)] == many


def test_a_damaged_array_loses_only_the_damaged_row(tmp_path: Path) -> None:
    good = json.dumps(ROW)
    deep = '{"a": ' + "[" * 50_000 + "]" * 50_000 + "}"
    damaged = ['{"src": ["}, {"], }', "nonsense", '{"a": yes}', deep, '{"n": %s}' % ("9" * 5000), "7", '"s"']
    path = tmp_path / "a.json"
    path.write_text("[" + ",\n".join([good, *[row + ",\n" + good for row in damaged]]) + "]")
    found = [raw.kind if isinstance(raw, RowProblem) else "row" for _, raw in rows(path)]
    assert found[0::2] == ["row"] * 8
    assert found[1::2] == [
        "bad_json",
        "bad_json",
        "bad_json",
        "deep_nesting",
        "bad_json",
        "not_an_object",
        "not_an_object",
    ]
    path.write_text(f"[{good}, {good[:-3]}")
    assert [raw.kind if isinstance(raw, RowProblem) else "row" for _, raw in rows(path)] == ["row", "unreadable"]
    path.write_text(f"[{good}] {good}")
    assert [raw.kind if isinstance(raw, RowProblem) else "row" for _, raw in rows(path)] == ["row", "unreadable"]
    path.write_bytes(b'[{"src": ["\xff"], "tgt": ["b"]}, ' + good.encode() + b"]")
    assert outcomes(path) == [(1, "bad_unicode"), (2, "ok")]


def test_a_cut_gz_or_parquet_gives_its_good_rows_then_a_problem(tmp_path: Path) -> None:
    many = "".join(json.dumps({"src": [str(random.Random(i).random())], "tgt": ["a"]}) + "\n" for i in range(9999))
    whole = gzip.compress(many.encode())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    found = outcomes(tmp_path / "a.jsonl.gz")
    assert found[-1][1] == "unreadable"
    assert len(found) > 100
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + b"x" * 100)
    assert outcomes(tmp_path / "a.parquet") == [(1, "unreadable")]


def test_parquet_types_that_json_has_not_are_problems(tmp_path: Path) -> None:
    import datetime

    from pyarrow import Table, parquet

    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    row = {"messages": turns, "tools": [{"when": datetime.datetime(2025, 1, 1)}]}
    parquet.write_table(Table.from_pylist([row]), tmp_path / "a.parquet")
    assert outcomes(tmp_path / "a.parquet", "messages") == [(1, "wrong_type")]


def test_empty_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf\n \r\n")
    (tmp_path / "c.json").write_bytes(b"[]")
    for name in ("a.jsonl", "b.jsonl", "c.json"):
        assert outcomes(tmp_path / name) == []
        with pytest.raises(DataError, match="is empty" if name == "a.jsonl" else "no rows"):
            detect(tmp_path / name)
    with pytest.raises(DataError, match="does not exist"):
        list(read(tmp_path / "none.jsonl", "erniekit"))
    with pytest.raises(DataError, match="folder"):
        list(rows(tmp_path))
    with pytest.raises(ConfigError, match="alpca"):
        list(read(tmp_path / "a.jsonl", "alpca"))


def test_memory_stays_flat_over_a_long_file(tmp_path: Path) -> None:
    line = json.dumps({"src": ["the quiet river " * 20], "tgt": ["the warm harbor " * 20]}) + "\n"
    array = tmp_path / "a.json"
    array.write_text("[" + (line[:-1] + ",\n") * 29_999 + line + "]")
    lines = tmp_path / "a.jsonl"
    lines.write_text(line * 30_000)
    assert memory_to_read(lines, array) < 16  # MiB, for two files of 20 MB: buffers of 1 MiB, one row at a time


@pytest.mark.parametrize("text", ["[}", '[{"a": 1}, }]', '[{"a": 1} }, {"b": 2}]', "[x}   "])
def test_a_lone_brace_in_an_array_is_a_problem_once_and_not_for_ever(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_text(text)
    found = list(islice(rows(path), 10))
    assert len(found) <= 3
    assert sum(isinstance(raw, RowProblem) for _, raw in found) == 1


@pytest.mark.parametrize("filler", [b" ", b",", b"\n"])
def test_blanks_and_commas_between_rows_cost_next_to_nothing(tmp_path, filler):
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"a": 1}' + b"," + filler * (24 << 20) + b'{"b": 2}]')
    began = time.process_time()
    assert [row for _, row in rows(path)] == [{"a": 1}, {"b": 2}]
    assert within(time.process_time() - began, 1.5)  # three seconds, character by character


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_row_that_gives_a_key_twice_is_a_problem_that_names_it(name: str, tmp_path: Path) -> None:
    good, bad = '{"src": ["q"], "tgt": ["a"]}', '{"src": ["q"], "tgt": ["a"], "more": {"label": 1, "label": 0}}'
    path = tmp_path / name
    path.write_text(f"[{good}, {bad}, {good}]" if name.endswith(".json") else f"{good}\n{bad}\n{good}\n")
    found = [parse(raw, number, path, "erniekit") for number, raw in rows(path)]
    assert [isinstance(one, RowProblem) for one in found] == [False, True, False]
    assert (found[1].line, found[1].kind) == (2, "repeated_key")
    assert "`label` is given twice" in found[1].reason


@pytest.mark.parametrize("content", ['{"src": ["é"]}'.encode("latin-1"), b"\x89PNG\r\n\x1a\n"])
def test_a_dataset_that_is_no_utf8_text_is_named_so(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match="not UTF-8 text") as refused:
        detect(path)
    assert "save it as UTF-8" in refused.value.fix


def test_a_number_of_ten_thousand_digits_is_told_without_python(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"src": %s}' % ("9" * 10_000))
    [(_, problem)] = read(path, "erniekit")
    assert "more digits" in problem.reason
    assert "sys." not in problem.reason
