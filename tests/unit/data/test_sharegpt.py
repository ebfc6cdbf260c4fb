"""ShareGPT rows: speakers, systems, tools, thoughts and pairs, equal to the same rows in OpenAI's names."""

from __future__ import annotations

import json

import pytest

from erniekit.data.formats import parse, parse_pair
from erniekit.data.preference import Preference
from erniekit.data.types import ChatMessage, Conversation, RowProblem

FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}


def read(row: object, format: str = "sharegpt") -> list[Conversation] | RowProblem:
    return parse(json.dumps(row).encode(), 1, "f.jsonl", format)


def turns(*said: tuple[str, object]) -> list[dict]:
    return [{"from": who, "value": value} for who, value in said]


@pytest.mark.parametrize(("human", "gpt"), [("human", "gpt"), ("user", "assistant"), ("Human", "ChatGPT")])
def test_speakers_are_roles_under_any_of_their_names(human: str, gpt: str) -> None:
    (found,) = read({"conversations": turns((human, " q "), (gpt, "a\n"), (human, "r"), (gpt, "b"))})
    assert [(m.role, m.content) for m in found.messages] == [
        ("user", " q "), ("assistant", "a\n"), ("user", "r"), ("assistant", "b"),
    ]  # fmt: skip


def test_the_system_text_stands_on_the_row_or_in_the_list() -> None:
    said = turns(("human", "q"), ("gpt", "a"))
    (on_row,) = read({"conversations": said, "system": "s"})
    (in_list,) = read({"conversations": [*turns(("system", "s")), *said]})
    assert on_row == in_list
    assert on_row.messages[0] == ChatMessage("system", "s")


@pytest.mark.parametrize("as_text", [True, False])
def test_tool_rows_equal_the_same_rows_in_openai_names(as_text: bool) -> None:
    tools: object = [FUNCTION]
    call: object = CALL
    row = {
        "conversations": turns(
            ("human", "Rain in Oslo?"),
            ("function_call", json.dumps(call) if as_text else call),
            ("observation", "rain"),
            ("gpt", "Yes."),
        ),
        "tools": json.dumps(tools) if as_text else tools,
    }
    openai = {
        "messages": [
            {"role": "user", "content": "Rain in Oslo?"},
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
            {"role": "tool", "content": "rain"},
            {"role": "assistant", "content": "Yes."},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    found = read(row)
    assert len(found) == 2  # an example for the call, and one for the answer
    assert found == read(openai, "chatml")


def test_thoughts_and_training_flags_stand_beside_the_value() -> None:
    said = turns(("human", "q"), ("gpt", "a"), ("human", "r"), ("gpt", "b"))
    said[1] |= {"weight": 0}
    said[3] |= {"reasoning_content": "so it is"}
    (found,) = read({"conversations": said})
    assert [m.trained for m in found.messages[1::2]] == [False, True]
    assert found.messages[3].thought == "so it is"


@pytest.mark.parametrize(
    ("said", "kind", "names"),
    [
        (turns(("narrator", "q")), "bad_role", "conversations[0].from"),
        (turns(("human", "q"), ("gpt", " ")), "empty_text", "conversations[1].value"),
        (turns(("gpt", "a")), "role_order", "conversations[0].from"),
        (turns(("human", "q")), "no_answer", "conversations"),
        (turns(("human", "q"), ("function_call", "weather(Oslo)")), "bad_json", "conversations[1].value"),
        ([1], "wrong_type", "`from` and `value`"),
        ("text", "wrong_type", "conversations"),
    ],
)
def test_bad_rows_are_named_in_the_words_of_the_format(said: object, kind: str, names: str) -> None:
    problem = read({"conversations": said})
    assert isinstance(problem, RowProblem)
    assert problem.kind == kind
    assert names in problem.reason


def test_pairs_have_their_prompt_in_conversations() -> None:
    chosen, rejected = turns(("gpt", "A swallow."), ("gpt", "A trout."))
    row = {"conversations": turns(("human", "Name a bird.")), "chosen": chosen, "rejected": rejected, "system": "s"}
    found = parse_pair(json.dumps(row).encode(), 1, "f", "sharegpt")
    assert isinstance(found, Preference)
    assert [m.content for m in (*found.prompt, *found.chosen, *found.rejected)] == [
        "s", "Name a bird.", "A swallow.", "A trout.",
    ]  # fmt: skip
    assert not found.unused
