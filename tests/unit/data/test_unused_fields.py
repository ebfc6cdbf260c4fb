"""A field of a row is read, refused with its line, or named in the report: nothing a row says is lost in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.data.formats import parse, parse_pair
from erniekit.data.inspect import data_command
from erniekit.data.types import ChatMessage, RowProblem
from support.jsonl import write_jsonl

ASKED, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TOLD = {"role": "tool", "content": "t", "tool_call_id": "c1"}
OTHER = {"role": "assistant", "content": "b"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def read(row: object, format: str, compat: bool = False):
    pair = isinstance(row, dict) and ("chosen" in row or "sort" in row)
    found = (parse_pair if pair else parse)(json.dumps(row).encode(), 1, "f", format, compat)
    return found[0] if isinstance(found, list) else found


@pytest.mark.parametrize(
    ("format", "row", "names"),
    [
        ("messages", {"messages": [ASKED, SAID], "score": 0, "id": "x", "note": None, "tags": []}, ["score", "id"]),
        ("messages", {"messages": [{**ASKED, "name": "bob"}, {**SAID, "name": "ann"}]}, ["messages[].name"]),
        ("messages", [ASKED, {**SAID, "logprobs": [1]}], ["messages[].logprobs"]),
        ("messages", {"messages": [{**ASKED, "reasoning_content": "r"}, SAID]}, ["messages[].reasoning_content"]),
        ("messages", {"messages": [{**ASKED, "weight": 1}, SAID]}, ["messages[].weight"]),
        ("messages", {"messages": [{**ASKED, "weight": 0}, {**SAID, "weight": 1}]}, []),
        ("messages", {"messages": [ASKED, SAID], "src": ["q"]}, ["src"]),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "q", "cache": 1}]}, SAID]},
            ["messages[].content[].cache"],
        ),
        (
            "chatml",
            {"messages": [ASKED, {**SAID, "tool_calls": [CALL]}, TOLD, SAID]},
            ["messages[].tool_calls[].id", "messages[].tool_call_id"],
        ),
        ("erniekit", {"src": ["q"], "tgt": ["a"], "system": "s", "label": [1], "source": "web"}, ["source"]),
        ("erniekit", {"src": ["s", "q"], "tgt": ["-", "a"], "is_system": 1, "system": "t"}, ["system", "tgt[0]"]),
        ("erniekit", {"src": ["q"], "tgt": ["a"], "messages": [ASKED, SAID]}, ["messages"]),
        ("erniekit", {"src": ["q"], "tgt": [], "response": ["a", "b"], "sort": [1, 0], "label": [1]}, ["label"]),
        ("alpaca", {"instruction": "q", "input": "", "output": "a", "text": "q a"}, ["text"]),
        ("alpaca", {"prompt": "q", "question": "r", "chosen": "a", "rejected": "b"}, ["prompt"]),
        ("messages", {"prompt": "q", "chosen": [ASKED, SAID], "rejected": [ASKED, OTHER]}, ["prompt"]),
        ("messages", {"prompt": "q", "chosen": [{**SAID, "weight": 0}], "rejected": "b"}, ["chosen[].weight"]),
    ],
)  # fmt: skip
def test_fields_no_reader_takes_are_named(format: str, row: object, names: list[str]) -> None:
    found = read(row, format)
    assert not isinstance(found, RowProblem), found
    assert list(found.unused) == names


@pytest.mark.parametrize(
    ("format", "row"),
    [
        ("alpaca", {"instruction": "q", "output": "a", "history": [["r", "b"]]}),
        ("messages", {"prompt": "q", "chosen": "a", "rejected": "b", "score_delta": 2.0}),
        ("messages", {"messages": [ASKED, {**SAID, "loss": 0}]}),
        ("messages", {"messages": [ASKED, SAID], "system": "s"}),
        ("alpaca", {"instruction": "q", "output": "a", "tools": [{"type": "function"}]}),
        ("erniekit", {"src": ["q"], "tgt": ["a"], "images": ["x.png"]}),
    ],
)
def test_what_erniekit_did_not_read_is_not_read_under_compat_and_named(format: str, row: dict) -> None:
    found = read(row, format, compat=True)
    assert not isinstance(found, RowProblem), found
    assert len(found.unused) == 1


@pytest.mark.parametrize(
    ("format", "row", "kind"),
    [
        ("messages", {"messages": [ASKED, {**SAID, "function_call": {"name": "f"}}]}, "tools"),
        ("messages", {"messages": [ASKED, SAID], "functions": [{"name": "f"}]}, "tools"),
        ("messages", {"messages": [ASKED, {**SAID, "weight": 0, "train": True}]}, "bad_label"),
        ("messages", {"messages": [ASKED, {**SAID, "weight": 0}], "label": [1]}, "bad_label"),
        ("messages", {"messages": [ASKED, {**SAID, "loss": 0.5}]}, "bad_label"),
        ("messages", {"messages": [{"role": "system", "content": "s"}, ASKED, SAID], "system": "t"}, "two_systems"),
        ("messages", {"messages": [ASKED, SAID, {"role": "system", "content": "s"}, ASKED, SAID]}, "role_order"),
        ("messages", {"messages": [{"role": "system", "content": "s"}] * 2 + [ASKED, SAID]}, "role_order"),
        ("messages", {"messages": [ASKED, SAID, ASKED]}, "no_answer"),
        ("messages", {"messages": [ASKED, {**SAID, "content": " "}]}, "empty_text"),
        ("messages", {"messages": [ASKED, SAID], "images": ["x.png"]}, "not_text"),
        ("alpaca", {"instruction": "q", "output": "a", "image": "x.png"}, "not_text"),
        ("alpaca", {"instruction": "q", "output": "a", "tools": "weather"}, "bad_json"),
        ("erniekit", {"src": ["q"], "tgt": ["a"], "tools": {"type": "function"}}, "wrong_type"),
        ("erniekit", {"src": ["s", "q"], "tgt": ["-", "a"], "is_system": "yes"}, "bad_label"),
        ("alpaca", {"instruction": "q", "chosen": "a", "rejected": "b", "images": ["x"]}, "not_text"),
    ],
)
def test_what_would_be_lost_with_its_meaning_is_a_bad_row(format: str, row: dict, kind: str) -> None:
    found = read(row, format)
    assert isinstance(found, RowProblem)
    assert found.kind == kind


def test_a_system_text_of_the_row_and_a_loss_flag_are_honoured() -> None:
    assert read({"messages": [ASKED, SAID], "system": "s"}, "messages").messages[0] == ChatMessage("system", "s")
    twice = {"messages": [{"role": "system", "content": "s"}, ASKED, SAID], "system": "s"}
    assert [m.role for m in read(twice, "messages").messages] == ["system", "user", "assistant"]
    flags = [m.trained for m in read({"messages": [ASKED, {**SAID, "loss": False}, ASKED, SAID]}, "messages").messages]
    assert flags == [True, False, True, True]
    pair = {"system": "s", "prompt": [ASKED], "chosen": "a", "rejected": "b"}
    assert read(pair, "messages").prompt[0] == ChatMessage("system", "s")


def test_the_report_counts_rows_by_field_and_the_cache_keeps_it(opened, tmp_path: Path) -> None:
    rows = [{"messages": [ASKED, {**SAID, "content": "the quiet river", "name": "x"}], "score": i} for i in range(30)]
    path = write_jsonl(tmp_path / "a.jsonl", [*rows, {"messages": [ASKED, {**SAID, "content": "the quiet river"}]}])
    made, again = opened(path).report, opened(path).report
    assert again.from_cache
    for report in (made, again):
        assert report.unused == {"score": 30, "messages[].name": 30}
        assert "  fields not used: `messages[].name` in 30 rows, `score` in 30 rows" in report.lines()
        assert report.to_dict()["unused"] == report.unused


def test_erniekit_data_names_them(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"messages": [ASKED, {**SAID, "reasoning_content": "r"}], "score": 1}, [ASKED, SAID]]
    )
    assert data_command([str(path)]) == 0
    out = capsys.readouterr().out
    assert "fields not used: `score` in 1 row" in out
    assert "1 answer has a thought first" in out


def test_names_without_end_do_not_fill_the_memory(opened, tmp_path: Path) -> None:
    rows = [{"src": ["the quiet river"], "tgt": ["copper lantern"], f"k{i}": 1} for i in range(2500)]
    report = opened(write_jsonl(tmp_path / "a.jsonl", rows)).report
    assert len(report.unused) == 1001
    assert sum(report.unused.values()) == 2500
    assert any("more fields" in line for line in report.lines())
