"""Every format and file kind, and every way a row can be bad: a Problem with line and reason, never an exception."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.data.formats import FORMATS, detect, parse, read, rows
from erniekit.data.inspect import data_command
from erniekit.data.types import Conversation, Message, Problem
from erniekit.errors import ConfigError, DataError

ROW = {"src": ["q1", "q2"], "tgt": ["a1", "a2"]}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOL_ROW = {
    "messages": [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "a"},
    ],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}


def said(*texts: str, system: str | None = None) -> Conversation:
    start = (Message("system", system),) if system is not None else ()
    return Conversation((*start, *(Message(("user", "assistant")[i % 2], t) for i, t in enumerate(texts))))


def one(row: object, format: str = "erniekit", compat: bool = False) -> Conversation | Problem:
    found = parse(json.dumps(row).encode(), 1, "f.jsonl", format, compat)
    if isinstance(found, list):
        assert len(found) == 1
        return found[0]
    return found


def write(path: Path, *lines: object) -> Path:
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return path


# --- erniekit ---------------------------------------------------------------------------------------------------------


def test_erniekit_rows() -> None:
    assert one(ROW) == said("q1", "a1", "q2", "a2")
    assert one({"src": " q ", "tgt": "\na"}) == said("q", "a")
    assert one({**ROW, "system": " s "}) == said("q1", "a1", "q2", "a2", system=" s ")
    assert one({"src": ["s", "q"], "tgt": ["ok", "a"], "is_system": 1}) == said("q", "a", system="s")
    assert [m.trained for m in one({**ROW, "label": [0, 1]}).messages[1::2]] == [False, True]
    assert [m.trained for m in one({**ROW, "label": [True, 0.0]}).messages[1::2]] == [True, False]
    assert one({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}) == said(
        "q", "a"
    )


def test_an_empty_system_text_is_none_but_kept_under_compat() -> None:
    assert one({**ROW, "system": ""}) == one({**ROW, "system": None}) == one(ROW)
    assert one({**ROW, "system": ""}, compat=True).messages[0] == Message("system", "")


@pytest.mark.parametrize(
    ("row", "kind", "names"),
    [
        ({"tgt": ["a"]}, "missing_field", "src"),
        ({"src": ["a"], "tgt": None}, "missing_field", "tgt"),
        ({"src": [], "tgt": []}, "empty_text", "src"),
        ({"src": ["a", " "], "tgt": ["b", "c"]}, "empty_text", "src[1]"),
        ({"src": ["a"], "tgt": ["\n"]}, "empty_text", "tgt[0]"),
        ({"src": ["a", "b"], "tgt": ["c"]}, "length_mismatch", "src"),
        ({**ROW, "label": [1]}, "length_mismatch", "label"),
        ({**ROW, "label": [1, 2]}, "bad_label", "label[1]"),
        ({**ROW, "label": [1, float("nan")]}, "bad_label", "label[1]"),
        ({**ROW, "label": [1, "1"]}, "bad_label", "label[1]"),
        ({**ROW, "label": [1, 10**30]}, "bad_label", "label[1]"),
        ({**ROW, "system": 7}, "wrong_type", "system"),
        ({"src": {"a": 1}, "tgt": "b"}, "wrong_type", "src"),
        ({"src": [1], "tgt": ["b"]}, "wrong_type", "src[0]"),
        ({"src": [["a"]], "tgt": ["b"]}, "wrong_type", "src[0]"),
        ({"src": ["s"], "tgt": ["a"], "is_system": 1}, "no_answer", "is_system"),
        ({"src": ["\ud800"], "tgt": ["a"]}, "bad_unicode", "src[0]"),
        ({"src": ["q"], "tgt": [], "response": ["a", "b"], "sort": [1, 0]}, "preference", "stage: DPO"),
        ([1, 2], "wrong_type", "messages[0]"),
        ("text", "not_an_object", "messages"),
        (None, "not_an_object", "messages"),
        (3.5, "not_an_object", "messages"),
    ],
)
def test_bad_erniekit_rows_name_the_field(row: object, kind: str, names: str) -> None:
    problem = one(row)
    assert isinstance(problem, Problem)
    assert (problem.file, problem.line, problem.kind) == ("f.jsonl", 1, kind)
    assert names in problem.reason


# --- alpaca -----------------------------------------------------------------------------------------------------------


def test_alpaca_rows_include_history_and_join_with_a_newline() -> None:
    row = {"instruction": "i", "input": "n", "output": "o", "history": [["h1", "h2"]], "system": "s"}
    assert one(row, "alpaca") == said("h1", "h2", "i\nn", "o", system="s")
    assert one(row, "alpaca", compat=True) == said("in", "o", system="s")
    assert one({"instruction": "i", "output": "o", "history": None, "input": ""}, "alpaca") == said("i", "o")
    assert one({"instruction": "", "input": "n", "output": "o"}, "alpaca") == said("n", "o")


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"output": "o"}, "missing_field"),
        ({"instruction": "i"}, "missing_field"),
        ({"instruction": " ", "output": "o"}, "empty_text"),
        ({"instruction": "i", "output": ""}, "empty_text"),
        ({"instruction": "i", "output": ["o"]}, "wrong_type"),
        ({"instruction": "i", "output": "o", "history": "h"}, "wrong_type"),
        ({"instruction": "i", "output": "o", "history": [["h"]]}, "wrong_type"),
        ({"instruction": "i", "output": "o", "history": [["h", ""]]}, "empty_text"),
        ({"instruction": "i", "chosen": "a", "rejected": "b"}, "preference"),
        ([], "not_an_object"),
    ],
)
def test_bad_alpaca_rows(row: object, kind: str) -> None:
    assert one(row, "alpaca").kind == kind


# --- messages and chatml ----------------------------------------------------------------------------------------------


def chat(*pairs: tuple[str, object], **extra: object) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in pairs], **extra}


def test_messages_rows() -> None:
    row = chat(("developer", "s"), ("user", " q "), ("assistant", "a "))
    assert one(row, "messages") == said(" q ", "a ", system="s")  # as a server would send them: not stripped
    assert one(row["messages"], "messages") == one(row, "messages")
    parts = [{"type": "text", "text": "q"}, {"type": "text", "text": "r"}]
    assert one(chat(("system", ""), ("user", parts), ("assistant", "a")), "messages") == said("qr", "a")
    four = (("user", "q"), ("assistant", "a"), ("user", "q"), ("assistant", "a"))
    assert [m.trained for m in one(chat(*four, label=[0, 1]), "messages").messages[1::2]] == [False, True]
    weighted = chat(*four)
    weighted["messages"][1]["weight"] = 0
    weighted["messages"][3]["train"] = False
    assert [m.trained for m in one(weighted, "messages").messages[1::2]] == [False, False]


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"messages": "x"}, "wrong_type"),
        ({"messages": []}, "no_answer"),
        ({"messages": [None]}, "wrong_type"),
        ({"messages": [{"content": "q"}]}, "bad_role"),
        (chat(("user", "q")), "no_answer"),
        (chat(("assistant", "a")), "role_order"),
        (chat(("user", "q"), ("user", "q"), ("assistant", "a")), "role_order"),
        (chat(("user", "q"), ("assistant", "a"), ("assistant", "a")), "role_order"),
        (chat(("user", "q"), ("system", "s"), ("assistant", "a")), "role_order"),
        (chat(("user", "q"), ("tool", "t"), ("assistant", "a")), "role_order"),
        (chat(("user", "q"), ("assistant", " ")), "empty_text"),
        (chat(("user", None), ("assistant", "a")), "empty_text"),
        (chat(("human", "q"), ("assistant", "a")), "bad_role"),
        (chat((["user"], "q")), "bad_role"),
        (chat(("user", [{"type": "image_url"}]), ("assistant", "a")), "not_text"),
        (chat(("user", "q"), ("assistant", "a"), label=[1, 1]), "length_mismatch"),
        (chat(("user", "q"), ("assistant", "a"), tools="{"), "bad_json"),
        (chat(("user", "q"), ("assistant", "a"), tools=[1]), "wrong_type"),
        (chat(("user", "q"), ("assistant", "a"), tools=[{"n": "\udfff"}]), "bad_unicode"),
    ],
)
def test_bad_messages_rows(row: object, kind: str) -> None:
    assert one(row, "messages").kind == kind


def test_chatml_gives_one_example_per_trained_answer() -> None:
    first, second = parse(json.dumps(TOOL_ROW).encode(), 1, "f", "chatml")
    assert [m.role for m in first.messages] == ["user", "assistant"]
    assert first.messages[-1].tool_calls == ({"type": "function", "function": {"name": "f", "arguments": {"x": 1}}},)
    assert [m.role for m in second.messages] == ["user", "assistant", "tool", "assistant"]
    assert [m.trained for m in second.messages] == [False, False, False, True]
    assert first.tools == second.tools == tuple(TOOL_ROW["tools"])
    assert parse(json.dumps(TOOL_ROW).encode(), 1, "f", "messages") == [first, second]


def test_chatml_labels_count_every_assistant_message() -> None:
    row = chat(*[("user", "q"), ("assistant", "a")] * 3, label=[0, 1, 0])
    row["messages"][3]["content"] = "middle"
    [only] = parse(row, 1, "f", "chatml")
    assert only.messages[-1] == Message("assistant", "middle")
    assert len(only.messages) == 4
    assert parse(chat(("user", "q"), ("assistant", "a"), label=[0]), 1, "f", "chatml").kind == "untrained"


@pytest.mark.parametrize(
    "calls",
    ["x", [1], [{}], [{"function": {"name": 1}}], [{"name": "f", "arguments": "["}], [{"name": "f", "arguments": [1]}]],
)
def test_bad_tool_calls(calls: object) -> None:
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls}]}
    assert one(row, "chatml").kind in ("wrong_type", "bad_json")


# --- files ------------------------------------------------------------------------------------------------------------


def outcomes(path: Path, format: str = "erniekit") -> list[tuple[int, str]]:
    return [(line, x.kind if isinstance(x, Problem) else "ok") for line, x in read(path, format)]


def memory_to_read(*paths: Path) -> float:
    """MiB that a fresh process needs on top of its imports."""
    code = (
        "import resource, sys; from erniekit.data.formats import read\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "before = peak()\n"
        "for path in sys.argv[1:]: print(sum(1 for _ in read(path, 'erniekit')), end=' ')\n"
        "print(peak() - before)"
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


def test_damaged_lines_are_problems_and_the_rest_is_read(tmp_path: Path) -> None:
    good = json.dumps(ROW).encode()
    path = write(
        tmp_path / "a.jsonl",
        good,
        b'{"src": ["a\x00"], "tgt": ["b"]}',
        b"\x00\x00",
        b'{"src": ["\xff"], "tgt": ["b"]}',
        b"[" * 100_000,
        b'{"src": ["a"], "tgt": ["b"], "n": ' + b"9" * 5000 + b"}",
        b'{"src": ["a"], "tgt": ["b"], "n": NaN}',
        b'{"src": ["\\u0000"], "tgt": ["b"]}',
        good[:-5],
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


def test_utf16_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(ROW).encode("utf-16"))
    [(_, problem)] = read(path, "erniekit")
    assert "UTF-16" in problem.reason


def test_a_row_over_the_limit_is_a_problem_in_lines_and_arrays(tmp_path: Path) -> None:
    big = {"src": ["x" * 3_000_000], "tgt": ["b"]}
    lines = write(tmp_path / "a.jsonl", ROW, big, ROW)
    array = tmp_path / "a.json"
    array.write_text(json.dumps([ROW, big, ROW]))
    for path in (lines, array):
        found = [raw.kind if isinstance(raw, Problem) else "row" for _, raw in rows(path, max_row_bytes=1_000_000)]
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
    found = [raw.kind if isinstance(raw, Problem) else "row" for _, raw in rows(path)]
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
    assert [raw.kind if isinstance(raw, Problem) else "row" for _, raw in rows(path)] == ["row", "bad_json"]
    path.write_text(f"[{good}] {good}")
    assert [raw.kind if isinstance(raw, Problem) else "row" for _, raw in rows(path)] == ["row", "bad_json"]
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
        with pytest.raises(DataError, match="no rows"):
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
    array.write_text("[" + (line[:-1] + ",\n") * 49_999 + line + "]")
    lines = tmp_path / "a.jsonl"
    lines.write_text(line * 50_000)
    assert memory_to_read(lines, array) < 16  # MiB, for two files of 33 MB: buffers of 1 MiB, one row at a time


# --- detection, the command, and mutations ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "format"),
    [
        (ROW, "erniekit"),
        ({"instruction": "i", "output": "o"}, "alpaca"),
        (chat(("user", "q"), ("assistant", "a")), "messages"),
        ([{"role": "user", "content": "q"}], "messages"),
        (TOOL_ROW, "chatml"),
    ],
)
def test_formats_are_detected_and_say_why(row: object, format: str, tmp_path: Path) -> None:
    found = detect(write(tmp_path / "a.jsonl", b"{", row, row))
    assert found.format == format
    assert not found.preference
    assert "row" in found.why


def test_a_file_with_some_tool_rows_is_chatml(tmp_path: Path) -> None:
    plain = chat(("user", "q"), ("assistant", "a"))
    assert detect(write(tmp_path / "a.jsonl", plain, plain, TOOL_ROW)).format == "chatml"


@pytest.mark.parametrize(
    ("row", "hint"),
    [({"conversations": []}, "ShareGPT"), ({"text_info": []}, "VL-SFT"), ({"zzz": 1}, "zzz"), (b"{", "JSON")],
)
def test_unknown_formats_name_what_was_found(row: object, hint: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=hint):
        detect(write(tmp_path / "a.jsonl", row))


def test_the_data_command_lists_bad_rows_by_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path / "good.jsonl", ROW, ROW)
    bad = write(tmp_path / "bad.jsonl", ROW, b"{", *[{"src": [""], "tgt": ["x"]}] * 30)
    assert data_command([str(good)]) == 0
    assert data_command([str(good), str(bad)]) == 1
    out = capsys.readouterr().out
    assert "erniekit (rows have `src` and `tgt`)" in out
    assert "32 rows, 1 conversations, 31 bad rows" in out
    assert f"{bad}:2: not JSON" in out
    assert "11 more" in out


def test_rows_and_parse_can_cross_a_process_boundary() -> None:
    assert pickle.loads(pickle.dumps(parse)) is parse
    for result in (one(ROW), one({}), parse(json.dumps(TOOL_ROW).encode(), 1, "f", "chatml")):
        assert pickle.loads(pickle.dumps(result)) == result


def test_two_thousand_mutated_lines_raise_nothing(tmp_path: Path) -> None:
    rng = random.Random(20240)
    seeds = [json.dumps(row).encode() for row in (ROW, {**ROW, "label": [1, 0], "system": "s"}, TOOL_ROW)]
    seeds.append(b'{"instruction": "i", "input": "n", "output": "o", "history": [["a", "b"]]}')
    words = [b"null", b"{}", b"[]", b"-1", b"1e999", b"NaN", b'""', b"true", b"\\ud800", b"\xff", b"\x00", b'"', b"["]
    lines = []
    for _ in range(2000):
        line = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 6)):
            at, width = rng.randrange(len(line)), rng.randint(0, 8)
            how = rng.random()
            if how < 0.5:
                line[at : at + width] = rng.choice(words)
            elif how < 0.8:
                line[at] = rng.randrange(256)
            else:
                line[at : at + width] = line[:width]
        lines.append(bytes(line).replace(b"\n", b" "))
    path = write(tmp_path / "a.jsonl", *lines)
    array = tmp_path / "b.json"
    array.write_bytes(b"[" + b",".join(lines) + b"]")
    kinds = set()
    for format in FORMATS:
        for file in (path, array):
            for _, found in read(file, format):
                kinds.add(found.kind if isinstance(found, Problem) else "ok")
                assert isinstance(found, Conversation) or found.reason
    assert {"ok", "bad_json", "bad_utf8", "missing_field", "wrong_type", "empty_text"} <= kinds
