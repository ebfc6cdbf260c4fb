"""CSV and TSV files as people's programs write them."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import pytest

from erniekit.data.formats import detect, parse, parse_pair, rows
from erniekit.data.formats.tables import table_rows
from erniekit.data.types import RowProblem
from erniekit.errors import DataError

ROWS = [
    {"question": 'Say "hi", then bye', "answer": "  hi;\n\tbye "},
    {"question": "多少钱？", "answer": "a | b, c"},
    {"question": "x", "answer": "back\\slash"},
]


def written(path: Path, rows: list[dict], codec: str = "utf-8", **dialect) -> Path:
    with open(path, "w", encoding=codec, newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), **dialect)
        table.writeheader()
        table.writerows(rows)
    return path


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_every_dialect_reads_the_same(separator: str, ends: str, quoting: int, tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", ROWS, delimiter=separator, lineterminator=ends, quoting=quoting)
    assert [raw for _, raw in rows(path)] == ROWS


@pytest.mark.parametrize("codec", ["utf-8-sig", "gb18030", "utf-16"])
def test_what_spreadsheets_save_is_read(codec: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", ROWS, codec)
    assert [raw for _, raw in rows(path)] == ROWS
    assert detect(path).format == "prompt_completion"


def test_backslashes_before_quotes_and_packed_tsv(tmp_path: Path) -> None:
    odd = [{"question": 'Say "hi", please', "answer": "yes"}]
    path = written(tmp_path / "a.csv", odd, quotechar='"', escapechar="\\", doublequote=False)
    assert b'\\"hi' in path.read_bytes()
    assert [raw for _, raw in rows(path)] == odd
    tsv = written(tmp_path / "a.tsv", ROWS, delimiter="\t")
    packed = tmp_path / "b.tsv.gz"
    packed.write_bytes(gzip.compress(tsv.read_bytes()))
    assert [raw for _, raw in rows(packed)] == [raw for _, raw in rows(tsv)] == ROWS


def test_rows_are_numbered_by_their_first_line_and_bad_ones_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('q,a\n"two\nlines",x\n\nonly one\n1,2\n"open,y\n')
    found = list(rows(path))
    assert [line for line, _ in found] == [2, 5, 6, 7]
    assert found[2][1] == {"q": "1", "a": "2"}
    short, broken = found[1][1], found[3][1]
    assert isinstance(short, RowProblem)
    assert "1 cell, the header has 2 columns" in short.reason
    assert isinstance(broken, RowProblem)
    assert "the rest of the file is not read" in broken.reason


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("q,q\n1,2\n")
    with pytest.raises(DataError, match="2 columns are called `q`"):
        list(rows(path))


def test_cells_hold_messages_tools_lists_and_flags(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    path = written(tmp_path / "chat.csv", [{"messages": json.dumps(said), "tools": json.dumps(tools)}])
    ((line, raw),) = rows(path)
    (found,) = parse(raw, line, path, "chatml")
    assert found.tools == tuple(tools)
    assert found.messages[-1].tool_calls[0]["function"]["name"] == "f"
    path = written(tmp_path / "old.csv", [{"src": '["a", "b"]', "tgt": '["c", "d"]', "label": "[0, 1]"}])
    ((line, raw),) = rows(path)
    (found,) = parse(raw, line, path, "erniekit")
    assert [m.trained for m in found.messages[1::2]] == [False, True]
    row = {"prompt": json.dumps(said[:1]), "chosen": "a", "rejected": "b", "score_delta": "2.5"}
    path = written(tmp_path / "pairs.csv", [row])
    ((line, raw),) = rows(path)
    assert parse_pair(raw, line, path, "messages").score_delta == 2.5


@pytest.mark.parametrize("row", [b"a" * 5000, b"," * 5000, b'"' + b"a\n" * 2500, b'b,c\n,\r"' + b"x" * 9000])
def test_a_row_beyond_the_limit_is_refused_before_it_is_in_memory(row: bytes):
    class Counting(io.BytesIO):
        taken = 0

        def read1(self, size: int | None = -1) -> bytes:
            data = super().read1(size)
            self.taken += len(data)
            return data

        def peek(self, size: int) -> bytes:
            return self.getvalue()[:size]

    stream = Counting(b"prompt,answer\nq,a\n" + row + b"z" * 10_000_000)
    *_, (_, last) = table_rows(stream, "x.csv", "x.csv", 4000, 100)
    assert isinstance(last, RowProblem)
    assert last.kind == "unreadable"
    assert stream.taken < 100_000


def test_empty_lines_of_a_table_have_an_end(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"prompt,answer\nq,a\n" + b"\n" * 200_000 + b"q,a\n")
    assert [line for line, _ in rows(path)] == [2, 100_003]


def test_lines_of_a_table_may_end_in_carriage_returns(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'prompt,answer\rq,"a\rb"\rp,c\r')
    assert [raw for _, raw in rows(path)] == [{"prompt": "q", "answer": "a\rb"}, {"prompt": "p", "answer": "c"}]


def test_an_empty_cell_is_not_said_to_be_a_missing_column(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("question,answer\nHow?,\n", encoding="utf-8")
    [(line, raw)] = rows(path)
    problem = parse(raw, line, path, "prompt_completion")
    assert isinstance(problem, RowProblem)
    assert (problem.kind, problem.reason) == ("missing_field", "`answer` is null or an empty cell")


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_a_table_of_a_header_alone_is_said_to_have_no_rows(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("question\tanswer\n" if name == "a.tsv" else "question,answer\n")
    with pytest.raises(DataError, match="the table has no rows below its header") as error:
        detect(path)
    assert "JSON" not in str(error.value)
    assert error.value.where == str(path)
