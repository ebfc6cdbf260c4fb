"""Thoughts and tool calls beside answers: a row of any format becomes the samples of its `messages` row."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.data.formats import parse, parse_pair
from erniekit.data.formats.unpaired import unpaired
from erniekit.data.preference import PairRules
from erniekit.data.reward import reward_rows
from erniekit.data.types import RowProblem
from erniekit.data.unpaired_source import unpaired_rows
from support.jsonl import write_jsonl

TOOL = {"type": "function", "function": {"name": "depth", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "depth", "arguments": {"of": "harbor"}}}
THOUGHT = "quiet river"


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


ONE = {"messages": [user("the harbor?"), answer("copper", reasoning_content=THOUGHT)]}
TWO = {"messages": [user("the harbor?"), answer("copper"), user("and why?"), answer("blue", thinking=THOUGHT)]}
CALLED = {"messages": [user("the harbor?"), answer("", tool_calls=[CALL], reasoning=THOUGHT)], "tools": [TOOL]}
TOOLS_ALONE = {"messages": [user("the harbor?"), answer("copper")], "tools": [TOOL]}
LEARNT = {
    "src and tgt": ({"src": ["the harbor?"], "tgt": ["copper"], "reasoning_content": [THOUGHT]}, ONE),
    "src and tgt as texts": ({"src": "the harbor?", "tgt": "copper", "thinking": THOUGHT}, ONE),
    "a thought per tgt": (
        {"src": ["the harbor?", "and why?"], "tgt": ["copper", "blue"], "reasoning_content": [None, THOUGHT]},
        TWO,
    ),
    "a first tgt that answers the system": (
        {"src": ["s", "the harbor?"], "tgt": ["-", "copper"], "is_system": 1, "reasoning": ["", THOUGHT]},
        {**ONE, "system": "s"},
    ),
    "a call in place of a tgt": (
        {"src": ["the harbor?"], "tgt": [""], "tool_calls": [[CALL]], "reasoning_content": [THOUGHT], "tools": [TOOL]},
        CALLED,
    ),
    "alpaca": ({"instruction": "the harbor?", "output": "copper", "reasoning_content": THOUGHT}, ONE),
    "alpaca, with its history": (
        {"instruction": "and why?", "output": "blue", "history": [["the harbor?", "copper"]], "reasoning": THOUGHT},
        TWO,
    ),
    "alpaca that calls": (
        {"instruction": "the harbor?", "output": None, "tool_calls": [CALL], "thinking": THOUGHT, "tools": [TOOL]},
        CALLED,
    ),
    "alpaca with tools": ({"instruction": "the harbor?", "output": "copper", "tools": [TOOL]}, TOOLS_ALONE),
    "prompt and completion": ({"prompt": "the harbor?", "completion": "copper", "reasoning": THOUGHT}, ONE),
    "a question that is answered by a call": (
        {"question": "the harbor?", "answer": "", "tool_calls": [CALL], "reasoning": THOUGHT, "tools": [TOOL]},
        CALLED,
    ),
    "a prompt of messages, a completion of text": (
        {"prompt": [user("the harbor?")], "completion": "copper", "reasoning_content": THOUGHT},
        ONE,
    ),
    "completion messages, thought on the row": (
        {"prompt": [user("the harbor?")], "completion": [answer("copper")], "reasoning_content": THOUGHT},
        ONE,
    ),
    "sharegpt, thought on the row": (
        {
            "conversations": [{"from": "human", "value": "the harbor?"}, {"from": "gpt", "value": "copper"}],
            "reasoning_content": THOUGHT,
        },
        ONE,
    ),
    "messages, thought on the row": (
        {"messages": [user("the harbor?"), answer("copper"), user("and why?"), answer("blue")], "thinking": THOUGHT},
        TWO,
    ),
}
PAIR = {
    "messages": [user("the harbor?")],
    "chosen": [answer("copper", reasoning_content=THOUGHT)],
    "rejected": [answer("blue", reasoning_content="a loud river")],
}
BOTH = {"chosen": "copper", "rejected": "blue", "reasoning_content": [THOUGHT, "a loud river"]}
COMPARED = {
    "response and sort": {
        "src": ["the harbor?"],
        "tgt": [],
        "response": ["blue", "copper"],
        "sort": [0, 1],
        "reasoning_content": ["a loud river", THOUGHT],
    },
    "alpaca": {"instruction": "the harbor?", **BOTH},
    "an object of both": {
        **{"instruction": "the harbor?", **BOTH},
        "reasoning_content": {"chosen": THOUGHT, "rejected": "a loud river"},
    },
    "TRL's prompt": {"prompt": "the harbor?", **BOTH},
    "TRL's messages": {
        "prompt": [user("the harbor?")],
        "chosen": [answer("copper")],
        "rejected": [answer("blue")],
        "thinking": [THOUGHT, "a loud river"],
    },
    "transcripts": {
        "chosen": "\n\nHuman: the harbor?\n\nAssistant: copper",
        "rejected": "\n\nHuman: the harbor?\n\nAssistant: blue",
        "reasoning": [THOUGHT, "a loud river"],
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": "the harbor?"}],
        "chosen": {"from": "gpt", "value": "copper"},
        "rejected": {"from": "gpt", "value": "blue"},
        "reasoning_content": [THOUGHT, "a loud river"],
    },
}
JUDGED = {
    "src and tgt": {"src": ["the harbor?"], "tgt": ["copper"], "reasoning_content": [THOUGHT]},
    "alpaca": {"instruction": "the harbor?", "output": "copper", "thinking": THOUGHT},
    "TRL's texts": {"prompt": "the harbor?", "completion": "copper", "reasoning_content": THOUGHT},
    "TRL's messages": {"prompt": [user("the harbor?")], "completion": [answer("copper")], "reasoning": THOUGHT},
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "the harbor?"},
            {"from": "gpt", "value": "copper", "reasoning_content": THOUGHT},
        ]
    },
}


def samples(opened: Callable, path: Path, **options: Any) -> list[list[list[int]]]:
    source = opened(path, max_bad_fraction=0.0, max_seq_len=512, **options)
    assert not source.report.unused.keys() - {"tgt[0]"}, source.report.unused
    made = [[source.sample(i).ids.tolist(), source.sample(i).labels.tolist()] for i in range(len(source))]
    assert made
    return made


@pytest.mark.parametrize("name", LEARNT)
def test_a_row_of_any_format_is_learnt_as_its_messages_row(name: str, opened: Callable, tmp_path: Path) -> None:
    row, same = LEARNT[name]
    ours, theirs = (write_jsonl(tmp_path / file, [one]) for file, one in (("a.jsonl", row), ("b.jsonl", same)))
    assert samples(opened, ours) == samples(opened, theirs)


@pytest.mark.parametrize("kind", [None, reward_rows], ids=["DPO", "RM"])
@pytest.mark.parametrize("name", COMPARED)
def test_a_pair_of_any_format_is_compared_as_its_messages_row(
    name: str, kind: Any, opened: Callable, tmp_path: Path
) -> None:
    paths = [write_jsonl(tmp_path / file, [one]) for file, one in (("a.jsonl", COMPARED[name]), ("b.jsonl", PAIR))]
    ours, theirs = (samples(opened, path, pairs=PairRules(256), kind=kind) for path in paths)
    assert ours == theirs


@pytest.mark.parametrize("name", JUDGED)
def test_a_judged_answer_of_any_format_is_that_of_its_messages_row(name: str, opened: Callable, tmp_path: Path) -> None:
    other = {"prompt": "the river?", "completion": "quiet", "label": False}
    rows = [[{**one, "label": True}, other] for one in (JUDGED[name], ONE)]
    paths = [write_jsonl(tmp_path / f"{i}.jsonl", one) for i, one in enumerate(rows)]
    ours, theirs = (samples(opened, path, pairs=PairRules(256), kind=unpaired_rows) for path in paths)
    assert ours == theirs


def test_tools_of_a_judged_answer_and_of_a_pair_are_kept() -> None:
    (row,) = unpaired({"prompt": "q", "completion": "", "tool_calls": [CALL], "tools": [TOOL], "label": True})
    assert (row.answer[0].tool_calls, row.tools) == ((CALL,), (TOOL,))
    pair = parse_pair(
        json.dumps(
            {"instruction": "q", "chosen": "", "rejected": "b", "tool_calls": [[CALL], None], "tools": [TOOL]}
        ).encode(),
        1,
        "f",
        "alpaca",
    )
    assert not isinstance(pair, RowProblem), pair
    assert (pair.chosen[0].tool_calls, pair.rejected[0].tool_calls, pair.tools) == ((CALL,), (), (TOOL,))


@pytest.mark.parametrize(
    ("format", "row", "kind"),
    [
        ("erniekit", {"src": ["q", "r"], "tgt": ["a", "b"], "reasoning_content": "t"}, "length_mismatch"),
        ("erniekit", {"src": ["q"], "tgt": ["a"], "reasoning_content": ["t", "u"]}, "length_mismatch"),
        ("erniekit", {"src": ["q"], "tgt": ["a"], "reasoning_content": [3]}, "wrong_type"),
        ("erniekit", {"src": ["q", "r"], "tgt": ["", "b"], "tool_calls": [None, [CALL]]}, "empty_text"),
        ("alpaca", {"instruction": "q", "output": "a", "reasoning": "t", "thinking": "u"}, "two_thoughts"),
        ("alpaca", {"instruction": "q", "output": "<think>t</think>a", "thinking": "u"}, "two_thoughts"),
        ("alpaca", {"instruction": "q", "output": "a", "tool_calls": ["depth"]}, "wrong_type"),
        ("messages", {**ONE, "reasoning_content": "another"}, "two_thoughts"),
        ("messages", {**CALLED, "tool_calls": [CALL]}, "tools"),
        ("alpaca", {"instruction": "q", "chosen": "a", "rejected": "b", "reasoning_content": "t"}, "wrong_type"),
    ],
)
def test_what_cannot_be_told_apart_is_a_bad_row(format: str, row: dict, kind: str) -> None:
    read = parse_pair if "chosen" in row else parse
    found = read(json.dumps(row).encode(), 1, "f", format)
    assert isinstance(found, RowProblem), found
    assert found.kind == kind


@pytest.mark.parametrize("format", ["erniekit", "alpaca"])
def test_compat_reads_no_thought_and_names_the_field(format: str) -> None:
    row = {"src": ["q"], "tgt": ["a"]} if format == "erniekit" else {"instruction": "q", "output": "a"}
    [plain] = parse(json.dumps(row).encode(), 1, "f", format, True)
    [found] = parse(json.dumps({**row, "reasoning_content": "t", "tool_calls": [CALL]}).encode(), 1, "f", format, True)
    assert found == plain
    assert found.unused == ("reasoning_content", "tool_calls")


def test_cells_of_a_table_hold_thoughts_as_text_or_as_json(opened: Callable, tmp_path: Path) -> None:
    cells = {
        "src": ["the harbor?", '["the harbor?", "and why?"]', "the harbor?"],
        "tgt": ["copper", '["copper", "blue"]', "copper"],
        "reasoning_content": [THOUGHT, json.dumps([None, THOUGHT]), "[1, 2]"],
    }
    with open(tmp_path / "a.csv", "w", newline="", encoding="utf-8") as out:
        table = csv.writer(out)
        table.writerow(cells)
        table.writerows(zip(*cells.values()))
    numbers = {"messages": [user("the harbor?"), answer("copper", reasoning_content="[1, 2]")]}
    same = write_jsonl(tmp_path / "b.jsonl", [ONE, TWO, numbers])
    assert samples(opened, tmp_path / "a.csv") == samples(opened, same)
