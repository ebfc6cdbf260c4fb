"""Documents of text files: every kind of file, every place to resume from, and rows that cannot be read."""

from __future__ import annotations

import gzip
import json

import pytest

from erniekit.data import text_rows
from erniekit.data.text_rows import Place, PlainText, documents
from erniekit.data.types import RowProblem
from erniekit.errors import DataError

JSONL = b'\xef\xbb\xbf{"text": "a"}\r\n\n   \n\xef\xbb\xbf{"text": "b"}\nnot json\n{"text": "c"}'
TXT = "\ufeffFirst line\nsecond line  \n\n \t\n\nAnother\r\n\r\n  indented\nlast".encode()


def found(path, place=Place()):  # noqa: B008  a tuple
    return [(one.row, one.raw) for one in documents(path, place)]


def test_lines_of_jsonl_come_with_their_numbers_blank_ones_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    assert found(tmp_path / "a.jsonl") == [
        (1, b'{"text": "a"}'),
        (4, b'{"text": "b"}'),
        (5, b"not json"),
        (6, b'{"text": "c"}'),
    ]


def test_documents_of_txt_are_the_lines_between_blank_ones(tmp_path):
    (tmp_path / "a.txt").write_bytes(TXT)
    assert found(tmp_path / "a.txt") == [
        (1, b"First line\nsecond line"),
        (6, b"Another"),
        (8, b"  indented\nlast"),
    ]
    assert all(type(raw) is PlainText for _, raw in found(tmp_path / "a.txt"))


def test_an_empty_file_holds_no_document(tmp_path):
    for name in ("a.txt", "a.jsonl"):
        for content in (b"", b"\n\n \n"):
            (tmp_path / name).write_bytes(content)
            assert found(tmp_path / name) == []


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.jsonl.gz", "a.txt.gz", "a.json", "a.parquet", "a.json.gz"])
def test_reading_goes_on_from_any_place_as_if_it_had_never_stopped(tmp_path, name):
    path = tmp_path / name
    if "parquet" in name:
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow

        parquet.write_table(pyarrow.table({"text": ["a", "b", "c"]}), path)
    else:
        content = TXT if ".txt" in name else JSONL
        if ".json" in name and ".jsonl" not in name:
            content = json.dumps([{"text": t} for t in "abc"]).encode()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    whole = list(documents(path, Place(3)))
    assert len(whole) >= 3
    for i, one in enumerate(whole):
        assert one.after.file == 3
        rest = list(documents(path, one.after))
        assert [(r.row, r.raw) for r in rest] == [(r.row, r.raw) for r in whole[i + 1 :]]
    assert 0 <= whole[-1].read <= path.stat().st_size


def test_a_cut_archive_is_a_problem_once_and_not_the_end_of_a_run(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    lines = b"".join(b'{"text": "%d"}\n' % (i * 7919) for i in range(20000))
    path.write_bytes(gzip.compress(lines)[:-4000])
    *whole, last = documents(path, Place())
    assert len(whole) > 1000
    assert isinstance(last.raw, RowProblem)
    assert last.raw.kind == "unreadable"
    assert not list(documents(path, last.after))


def test_a_line_over_the_limit_is_a_problem_and_a_text_over_it_is_cut_at_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(text_rows, "MAX_ROW_BYTES", 50)
    (tmp_path / "a.jsonl").write_bytes(b"short\n" + b"x" * 500 + b"\nlast\n")
    first, second, third = found(tmp_path / "a.jsonl")
    assert (first, third) == ((1, b"short"), (3, b"last"))
    assert second[0] == 2
    assert second[1].kind == "row_too_long"
    (tmp_path / "a.txt").write_bytes(b"one line of text\n" * 8)
    blocks = found(tmp_path / "a.txt")
    assert [(row, raw.count(b"\n") + 1) for row, raw in blocks] == [(1, 3), (4, 3), (7, 2)]
    (tmp_path / "b.txt").write_bytes(b"a\n" + b"x" * 500 + b"\nb\n")
    kinds = [type(raw) for _, raw in found(tmp_path / "b.txt")]
    assert kinds == [RowProblem, PlainText]


def test_a_file_that_is_not_there_is_said_so(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        found(tmp_path / "none.txt")
