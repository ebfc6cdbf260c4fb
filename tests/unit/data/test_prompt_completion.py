"""A question and an answer in two fields: texts, message lists, tools, thoughts; and pairs with or without a prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.data.formats import detect, parse, parse_pair
from erniekit.data.formats.prompt_completion import divided_at_difference
from erniekit.data.preference import Preference
from erniekit.data.types import ChatMessage, Conversation, RowProblem
from support.jsonl import write_jsonl

RECORDED = Path(__file__).parents[2] / "data" / "trl" / "implicit_prompts.json"
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def read(row: object) -> list[Conversation] | RowProblem:
    return parse(json.dumps(row).encode(), 1, "f.jsonl", "prompt_completion")


def pair(row: object, format: str = "prompt_completion") -> Preference | RowProblem:
    return parse_pair(json.dumps(row).encode(), 1, "f.jsonl", format)


@pytest.mark.parametrize("asked", ["prompt", "question", "query", "instruction"])
@pytest.mark.parametrize("answered", ["completion", "response", "answer"])
def test_question_and_answer_have_many_names(asked: str, answered: str, tmp_path: Path) -> None:
    row = {asked: "q ", answered: "\n a", "system": "s"}
    (found,) = read(row)
    assert [(m.role, m.content) for m in found.messages] == [("system", "s"), ("user", "q "), ("assistant", "\n a")]
    assert not found.unused
    assert detect(write_jsonl(tmp_path / "a.jsonl", [row])).format == "prompt_completion"


def test_what_a_question_is_about_belongs_to_it() -> None:
    (found,) = read({"instruction": "Summarise.", "context": "A long story.", "response": "Short.", "category": "x"})
    assert found.messages[0].content == "Summarise.\nA long story."
    assert found.unused == ("category",)


def test_message_lists_train_what_the_completion_says() -> None:
    said = [{"role": "system", "content": "s"}, USER, ANSWER, {"role": "user", "content": "r"}]
    (found,) = read({"prompt": said, "completion": [{"role": "assistant", "content": "b"}]})
    assert [m.content for m in found.messages] == ["s", "q", "a", "r", "b"]
    assert [m.trained for m in found.messages if m.role == "assistant"] == [False, True]
    assert read({"prompt": said, "completion": {"role": "assistant", "content": "b"}}) == [found]
    assert read({"prompt": said, "completion": "b"}) == [found]


def test_message_lists_carry_tools_and_thoughts() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    row = {"prompt": [USER], "completion": [call, {"role": "tool", "content": "1"}, ANSWER], "tools": TOOLS}
    found = read(row)
    assert [len(one.messages) for one in found] == [2, 4]
    assert found[0].tools == tuple(TOOLS)
    (thinks,) = read({"prompt": [USER], "completion": [{**ANSWER, "reasoning_content": "hm"}]})
    assert thinks.messages[-1].thought == "hm"


def test_a_thought_may_stand_in_a_field_of_its_own() -> None:
    (found,) = read({"question": "q", "reasoning_content": "hm", "answer": "a"})
    assert found.messages[-1] == ChatMessage("assistant", "a", thought="hm")
    assert not found.unused


def test_an_undesired_answer_is_read_and_not_learnt() -> None:
    (found,) = read({"prompt": "q", "completion": "a", "label": False})
    assert not found.messages[-1].trained


def test_an_answer_that_is_json_stays_text() -> None:
    for answer in ('[{"name": "x"}]', "[1, 2]", "[not json", '{"role": "assistant"}'):
        (found,) = read({"prompt": "q", "completion": answer})
        assert found.messages[-1].content == answer


@pytest.mark.parametrize(
    ("row", "kind", "names"),
    [
        ({"prompt": "q"}, "missing_field", "completion"),
        ({"answer": "a"}, "missing_field", "prompt"),
        ({"question": " ", "answer": "a"}, "empty_text", "question"),
        ({"question": "q", "answer": ""}, "empty_text", "answer"),
        ({"question": "q", "answer": 4}, "wrong_type", "answer"),
        ({"question": "q", "answer": "a", "functions": TOOLS}, "tools", "functions"),
        ({"prompt": [USER, ANSWER], "completion": [ANSWER]}, "role_order", "completion[0].role"),
        ([1], "not_an_object", "prompt"),
    ],
)
def test_bad_rows_name_the_field(row: object, kind: str, names: str) -> None:
    problem = read(row)
    assert isinstance(problem, RowProblem)
    assert problem.kind == kind
    assert names in problem.reason


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "b"}]},
        {"chosen": [USER, ANSWER], "rejected": [USER, {"role": "assistant", "content": "b"}]},
        {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
    ],
)
def test_pairs_with_and_without_a_prompt_of_their_own_are_the_same_pair(row: dict, tmp_path: Path) -> None:
    detected = detect(write_jsonl(tmp_path / "a.jsonl", [row]))
    assert detected.preference
    for format in (detected.format, "prompt_completion"):
        found = pair(row, format)
        assert isinstance(found, Preference)
        assert [m.content for m in (*found.prompt, *found.chosen, *found.rejected)] == ["q", "a", "b"]


def test_a_transcript_of_several_turns_is_divided_where_it_differs() -> None:
    start = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Name a bird."
    found = pair({"chosen": f"{start}\n\nAssistant: A swallow.", "rejected": f"{start}\n\nAssistant: A trout."})
    assert [m.role for m in found.prompt] == ["user", "assistant", "user"]
    assert (found.chosen[0].content, found.rejected[0].content) == ("A swallow.", "A trout.")


def test_texts_are_divided_where_trl_divides_them() -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert len(recorded) >= 6
    for case in recorded:
        parts = divided_at_difference(case["chosen"], case["rejected"])
        assert ["".join(m.content for m in part) for part in parts] == case["parts"]


@pytest.mark.parametrize(("chosen", "rejected"), [("a", "b"), ("same", "same"), ("The sky", "The sky is")])
def test_answers_without_a_common_prompt_are_bad_rows(chosen: str, rejected: str) -> None:
    problem = pair({"chosen": chosen, "rejected": rejected})
    assert isinstance(problem, RowProblem)
    assert problem.kind == "no_question"
