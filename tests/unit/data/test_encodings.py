"""Real files in GBK, UTF-16 and damaged UTF-8: the first two read as their UTF-8 twins, the last never guessed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from erniekit.data.formats import detect, parse, rows
from erniekit.data.formats.files import file_encoding
from erniekit.data.text_rows import Place, documents
from erniekit.data.types import RowProblem
from erniekit.errors import DataError

ROWS = [
    {"src": ["中国的首都是哪里？"], "tgt": ["北京。"]},
    {"src": ["plain"], "tgt": ["ASCII"]},
    {"src": ["翻译成英文：山水"], "tgt": ["mountains and waters — 風景 😀"]},
]
TEXT = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n"


def read(path: Path) -> list:
    return [(line, parse(raw, line, path, "erniekit")) for line, raw in rows(path)]


@pytest.mark.parametrize(
    ("codec", "name"),
    [
        ("gb18030", "GB18030"), ("utf-16", "UTF-16-LE"), ("utf-16-le", "UTF-16-LE"), ("utf-16-be", "UTF-16-BE"),
        ("utf-8-sig", "UTF-8"), ("utf-8", "UTF-8"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_reads_the_same_in_every_encoding(codec: str, name: str, packed: bool, tmp_path: Path) -> None:
    utf8 = tmp_path / "utf8.jsonl"
    utf8.write_text(TEXT, encoding="utf-8")
    path = tmp_path / ("other.jsonl.gz" if packed else "other.jsonl")
    data = TEXT.encode(codec)
    path.write_bytes(gzip.compress(data) if packed else data)
    assert read(path) == read(utf8)
    assert detect(path).format == "erniekit"
    assert file_encoding(path).name == name
    assert bool(file_encoding(path).why) == (name != "UTF-8")


def test_gbk_of_more_than_one_chunk_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_bytes((TEXT.replace("😀", "") * 20_000).encode("gb18030"))
    count = 0
    for _, raw in rows(path):
        assert json.loads(raw) in ROWS or "風景" in raw.decode()
        count += 1
    assert count == 60_000


def test_a_row_that_is_not_valid_in_the_encoding_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = TEXT.encode("gb18030") * 8_000  # the damage lies beyond what detection looks at
    path.write_bytes(good + b'{"src": ["\xff\xff"], "tgt": ["x"]}\n' + TEXT.encode("gb18030"))
    problems = [found for _, found in read(path) if isinstance(found, RowProblem)]
    assert [(p.line, p.kind) for p in problems] == [(24_001, "bad_utf8")]


@pytest.mark.parametrize(
    "line",
    [
        json.dumps({"src": ["中文的句子"], "tgt": ["另一个句子"]}, ensure_ascii=False).encode()[:-5] + b'\xe5"]}',
        '{"src": ["Bébé à l\'été"], "tgt": ["café"]}'.encode("latin-1"),
        '{"src": ["Größe"], "tgt": ["übermäßig"]}'.encode("cp1252"),
        '{"src": ["こんにちは、世界"], "tgt": ["さようなら"]}'.encode("shift-jis"),
    ],
)
def test_what_is_neither_is_not_guessed(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line + b"\n")
    assert file_encoding(path).name == "UTF-8"
    ((_, found),) = read(path)
    assert isinstance(found, RowProblem)
    assert found.kind == "bad_utf8"


def test_one_damaged_line_does_not_change_the_others(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(TEXT.encode() * 3 + b'{"src": ["\xd6\xd0\xb9\xfa"], "tgt": ["x"]}\n')
    found = read(path)
    assert [isinstance(one, RowProblem) for _, one in found] == [False] * 9 + [True]


def test_utf_32_and_half_a_character_are_said(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(TEXT.encode("utf-32"))
    with pytest.raises(DataError, match="UTF-32"):
        list(rows(path))
    path.write_bytes(TEXT.encode("utf-16")[:-1])
    assert isinstance(read(path)[-1][1], RowProblem)


@pytest.mark.parametrize("codec", ["gb18030", "utf-16"])
def test_text_documents_resume_inside_another_encoding(codec: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("第一段的第一行\n第二行\n\n第二段\n\n\n第三段，到此结束".encode(codec))
    found = list(documents(path, Place()))
    assert [bytes(one.raw).decode() for one in found] == ["第一段的第一行\n第二行", "第二段", "第三段，到此结束"]
    again = list(documents(path, found[0].after))
    assert [one.raw for one in again] == [one.raw for one in found[1:]]
