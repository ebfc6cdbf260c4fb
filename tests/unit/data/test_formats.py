"""Every format, and every way a row can be bad: a Problem with line and reason, never an exception."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path

import pytest

from erniekit.data.formats import FORMATS, detect, parse, read
from erniekit.data.inspect import data_command
from erniekit.data.types import ChatMessage, Conversation, RowProblem
from erniekit.errors import DataError
from support.jsonl import write_jsonl

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
    start = (ChatMessage("system", system),) if system is not None else ()
    return Conversation((*start, *(ChatMessage(("user", "assistant")[i % 2], t) for i, t in enumerate(texts))))


def one(row: object, format: str = "erniekit", compat: bool = False) -> Conversation | RowProblem:
    found = parse(json.dumps(row).encode(), 1, "f.jsonl", format, compat)
    if isinstance(found, list):
        assert len(found) == 1
        return found[0]
    return found


# --- erniekit ---------------------------------------------------------------------------------------------------------


def test_erniekit_rows() -> None:
    assert one(ROW) == said("q1", "a1", "q2", "a2")
    assert one({"src": " q ", "tgt": "\na"}) == said(" q ", "\na")  # white space is kept
    assert one({"src": " q ", "tgt": "\na"}, compat=True) == said("q", "a")
    assert one({**ROW, "system": " s "}) == said("q1", "a1", "q2", "a2", system=" s ")
    assert one({"src": ["s", "q"], "tgt": ["ok", "a"], "is_system": 1}) == said("q", "a", system="s")
    assert [m.trained for m in one({**ROW, "label": [0, 1]}).messages[1::2]] == [False, True]
    assert [m.trained for m in one({**ROW, "label": [True, 0.0]}).messages[1::2]] == [True, False]
    assert one({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}) == said(
        "q", "a"
    )


def test_an_empty_system_text_is_none_but_kept_under_compat() -> None:
    assert one({**ROW, "system": ""}) == one({**ROW, "system": None}) == one(ROW)
    assert one({**ROW, "system": ""}, compat=True).messages[0] == ChatMessage("system", "")


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
    assert isinstance(problem, RowProblem)
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
    assert only.messages[-1] == ChatMessage("assistant", "middle")
    assert len(only.messages) == 4
    assert parse(chat(("user", "q"), ("assistant", "a"), label=[0]), 1, "f", "chatml").kind == "untrained"


@pytest.mark.parametrize(
    "calls",
    ["x", [1], [{}], [{"function": {"name": 1}}], [{"name": "f", "arguments": "["}], [{"name": "f", "arguments": [1]}]],
)
def test_bad_tool_calls(calls: object) -> None:
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls}]}
    assert one(row, "chatml").kind in ("wrong_type", "bad_json")


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
    found = detect(write_jsonl(tmp_path / "a.jsonl", [b"{", row, row]))
    assert found.format == format
    assert not found.preference
    assert "row" in found.why


def test_a_file_with_some_tool_rows_is_chatml(tmp_path: Path) -> None:
    plain = chat(("user", "q"), ("assistant", "a"))
    assert detect(write_jsonl(tmp_path / "a.jsonl", [plain, plain, TOOL_ROW])).format == "chatml"


@pytest.mark.parametrize(
    ("row", "hint"),
    [({"text_info": []}, "VL-SFT"), ({"zzz": 1}, "zzz"), (b"{", "JSON")],
)
def test_unknown_formats_name_what_was_found(row: object, hint: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=hint):
        detect(write_jsonl(tmp_path / "a.jsonl", [row]))


def test_the_data_command_lists_bad_rows_by_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", [ROW, ROW])
    bad = write_jsonl(tmp_path / "bad.jsonl", [ROW, b"{", *[{"src": [""], "tgt": ["x"]}] * 30])
    assert data_command([str(good)]) == 0
    assert data_command([str(good), str(bad)]) == 1
    out = capsys.readouterr().out
    assert "erniekit (rows have `src` and `tgt`)" in out
    assert "32 rows, 1 conversation, 31 bad rows" in out
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
    path = write_jsonl(tmp_path / "a.jsonl", [*lines])
    array = tmp_path / "b.json"
    array.write_bytes(b"[" + b",".join(lines) + b"]")
    kinds = set()
    for format in FORMATS:
        for file in (path, array):
            for _, found in read(file, format):
                kinds.add(found.kind if isinstance(found, RowProblem) else "ok")
                assert isinstance(found, Conversation) or found.reason
    assert {"ok", "bad_json", "bad_utf8", "missing_field", "wrong_type", "empty_text"} <= kinds
