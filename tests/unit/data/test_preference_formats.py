"""Preference rows of every format: what they become, and every way to be wrong by field."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from erniekit.data.formats import PREFERENCE_FORMATS, detect, parse, parse_pair
from erniekit.data.inspect import data_command
from erniekit.data.preference import Preference
from erniekit.data.types import ChatMessage, RowProblem

ROW = {"src": ["q"], "tgt": [], "response": [["good"], ["bad"]], "sort": [1, 0]}
LATER = {"src": ["q1", "q2"], "tgt": ["a1"], "response": [["bad"], ["good"]], "sort": [0.5, 3]}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def read(row: object, format: str = "erniekit", compat: bool = False) -> Preference | RowProblem:
    return parse_pair(json.dumps(row).encode(), 7, "file.jsonl", format, compat)


def pair(row: object, format: str = "erniekit", compat: bool = False) -> Preference:
    found = read(row, format, compat)
    assert isinstance(found, Preference), found
    return found


def said(messages: tuple[ChatMessage, ...]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_the_response_with_the_higher_sort_is_chosen() -> None:
    first, second = pair(ROW), pair(LATER)
    assert said(first.prompt) == [("user", "q")]
    assert (said(first.chosen), said(first.rejected)) == ([("assistant", "good")], [("assistant", "bad")])
    assert said(second.prompt) == [("user", "q1"), ("assistant", "a1"), ("user", "q2")]
    assert (said(second.chosen), said(second.rejected)) == ([("assistant", "good")], [("assistant", "bad")])


def test_how_far_apart_the_answers_sort_is_kept_but_not_by_the_old_reader() -> None:
    assert (pair(ROW).score_delta, pair(LATER).score_delta) == (1.0, 2.5)
    assert pair(LATER, compat=True).score_delta == 1.0
    asked = {"instruction": "i", "chosen": "a", "rejected": "b"}
    assert pair(asked, "alpaca").score_delta == 1.0
    assert pair({**asked, "score_delta": 2}, "alpaca").score_delta == 2.0
    assert pair({**asked, "score_delta": 2}, "alpaca", compat=True).score_delta == 1.0


def test_a_response_may_be_a_text_or_turns_of_assistant_and_user_and_each_its_own_number() -> None:
    found = pair({**ROW, "response": ["good", ["bad", "why?", " worse "]]})
    assert said(found.chosen) == [("assistant", "good")]
    assert said(found.rejected) == [("assistant", "bad"), ("user", "why?"), ("assistant", " worse ")]


def test_the_system_text_comes_from_its_field_or_from_the_first_src() -> None:
    assert said(pair({**ROW, "system": "s"}).prompt) == [("system", "s"), ("user", "q")]
    assert said(pair({**LATER, "is_system": 1}).prompt) == [("system", "q1"), ("user", "q2")]
    assert said(pair({**ROW, "system": ""}).prompt) == [("user", "q")]
    assert said(pair({**ROW, "system": ""}, compat=True).prompt)[0] == ("system", "")


def test_a_single_question_may_be_plain_text_without_tgt() -> None:
    assert said(pair({"src": "q", "response": ["a", "b"], "sort": [1, 0]}).prompt) == [("user", "q")]


def test_white_space_of_prompts_and_answers_is_kept() -> None:
    row = {**ROW, "src": [" q "], "response": [" good", "bad "]}
    for compat in (False, True):
        read = pair(row, compat=compat)
        assert (read.prompt[0].content, read.chosen[0].content, read.rejected[0].content) == (" q ", " good", "bad ")


@pytest.mark.parametrize(
    ("change", "kind", "names"),
    [
        ({"src": None}, "missing_field", "src"),
        ({"response": None}, "missing_field", "response"),
        ({"sort": None}, "missing_field", "sort"),
        ({"tgt": ["a"]}, "length_mismatch", "`tgt` 1"),
        ({"src": ["q1", "q2"]}, "length_mismatch", "`src` has 2"),
        ({"src": [" "]}, "empty_text", "src[0]"),
        ({"response": ["a"]}, "length_mismatch", "`response` must have two entries, it has 1"),
        ({"response": ["a", "b", "c"]}, "length_mismatch", "response"),
        ({"response": "a"}, "wrong_type", "response"),
        ({"response": [["a"], [1]]}, "wrong_type", "response[1][0]"),
        ({"response": [["a"], []]}, "empty_text", "response[1]"),
        ({"response": [["a"], [" "]]}, "empty_text", "response[1][0]"),
        ({"response": [None, "b"]}, "missing_field", "response[0]"),
        ({"response": [["a", "more?"], ["b"]]}, "length_mismatch", "end with the assistant"),
        ({"sort": [1, 1]}, "tie", "sort"),
        ({"sort": [1]}, "length_mismatch", "sort"),
        ({"sort": 1}, "wrong_type", "sort"),
        ({"sort": ["1", 0]}, "wrong_type", "sort[0]"),
        ({"sort": [1, True]}, "wrong_type", "sort[1]"),
        ({"sort": [float("nan"), 0]}, "wrong_type", "sort[0]"),
        ({"system": 3}, "wrong_type", "system"),
        ({"is_system": 1}, "no_question", "is_system"),
    ],
    ids=str,
)
def test_bad_erniekit_pairs_name_the_field(change: dict, kind: str, names: str) -> None:
    problem = read({**ROW, **change})
    assert isinstance(problem, RowProblem)
    assert (problem.file, problem.line, problem.kind) == ("file.jsonl", 7, kind)
    assert names in problem.reason


@pytest.mark.parametrize("asked", ["instruction", "question", "prompt"])
def test_alpaca_pairs_ask_under_several_names(asked: str) -> None:
    row = {asked: "i", "input": "n", "chosen": "a ", "rejected": "b", "system": "s", "history": [["h", "r"]]}
    found = pair(row, "alpaca")
    assert said(found.prompt) == [("system", "s"), ("user", "h"), ("assistant", "r"), ("user", "i\nn")]
    assert (said(found.chosen), said(found.rejected)) == ([("assistant", "a ")], [("assistant", "b")])


def test_the_old_reader_joins_instruction_and_input_and_knows_no_history() -> None:
    row = {"instruction": "i", "input": "n", "chosen": "a", "rejected": "b", "history": [["h", "r"]]}
    assert said(pair(row, "alpaca", compat=True).prompt) == [("user", "in")]


@pytest.mark.parametrize(
    ("row", "kind", "names"),
    [
        ({"chosen": "a", "rejected": "b"}, "missing_field", "instruction"),
        ({"question": " ", "chosen": "a", "rejected": "b"}, "empty_text", "question"),
        ({"instruction": "i", "chosen": "a"}, "missing_field", "rejected"),
        ({"instruction": "i", "chosen": "", "rejected": "b"}, "empty_text", "chosen"),
        ({"instruction": "i", "chosen": "a", "rejected": 3}, "wrong_type", "rejected"),
        ({"instruction": "i", "chosen": "a", "rejected": "b", "score_delta": 0}, "bad_score", "score_delta"),
        ({"instruction": "i", "chosen": "a", "rejected": "b", "score_delta": "x"}, "wrong_type", "score_delta"),
        ([1], "not_an_object", "chosen"),
    ],
    ids=str,
)
def test_bad_alpaca_pairs_name_the_field(row: object, kind: str, names: str) -> None:
    problem = read(row, "alpaca")
    assert isinstance(problem, RowProblem)
    assert problem.kind == kind
    assert names in problem.reason


@pytest.mark.parametrize("format", ["messages", "erniekit", "chatml"])
@pytest.mark.parametrize("field", ["messages", "prompt"])
def test_message_pairs_take_a_text_a_message_or_a_list_as_answer(format: str, field: str) -> None:
    prompt = [{"role": "system", "content": "s"}, user("q")]
    for chosen in ("a", assistant("a"), [assistant("a")]):
        found = pair({field: prompt, "chosen": chosen, "rejected": "b", "tools": TOOLS}, format)
        assert said(found.prompt) == [("system", "s"), ("user", "q")]
        assert (said(found.chosen), said(found.rejected)) == ([("assistant", "a")], [("assistant", "b")])
        assert found.tools == tuple(TOOLS)


def test_two_whole_conversations_share_what_they_begin_with_through_its_last_question() -> None:
    start = [user("q1"), assistant("a1"), user("q2")]
    row = {
        "prompt": "q1",  # some sets repeat the first question
        "chosen": [*start, assistant("yes"), user("q3"), assistant("x")],
        "rejected": [*start, assistant("no")],
    }
    found = pair(row, "messages")
    assert [m.content for m in found.prompt] == ["q1", "a1", "q2"]
    assert [m.content for m in found.chosen] == ["yes", "q3", "x"]
    assert [m.content for m in found.rejected] == ["no"]
    alike = pair({"chosen": [*start, assistant("same")], "rejected": [*start, assistant("same")]}, "messages")
    assert len(alike.prompt) == 3
    assert alike.chosen == alike.rejected


@pytest.mark.parametrize(
    ("row", "kind", "names"),
    [
        ({"chosen": "a", "rejected": "b"}, "missing_field", "prompt"),
        ({"messages": [user("q")], "chosen": "a"}, "missing_field", "rejected"),
        ({"messages": [], "chosen": "a", "rejected": "b"}, "role_order", "chosen[0]"),
        ({"messages": [user("q"), assistant("a")], "chosen": "a", "rejected": "b"}, "role_order", "chosen[0]"),
        ({"messages": [user("q"), user("q")], "chosen": "a", "rejected": "b"}, "role_order", "messages[1]"),
        ({"messages": [user("q")], "chosen": [user("a")], "rejected": "b"}, "role_order", "chosen[0]"),
        ({"messages": [user("q")], "chosen": "a", "rejected": [assistant("b"), user("c")]}, "no_answer", "rejected"),
        ({"chosen": [user("q"), assistant("a")], "rejected": [user("p"), assistant("a")]}, "no_question", "same"),
        ({"chosen": [user("q"), assistant("a")], "rejected": [user("q")]}, "no_answer", "rejected"),
        ({"chosen": [user("q"), user("a")], "rejected": [user("q"), assistant("b")]}, "role_order", "chosen[1]"),
        ({"messages": [user("q")], "chosen": {"role": "cat"}, "rejected": "b"}, "bad_role", "chosen.role"),
        ("text", "not_an_object", "chosen"),
    ],
    ids=str,
)
def test_bad_message_pairs_name_the_field(row: object, kind: str, names: str) -> None:
    problem = read(row, "messages")
    assert isinstance(problem, RowProblem)
    assert problem.kind == kind
    assert names in problem.reason


def test_a_row_for_sft_is_a_bad_row_for_dpo_and_the_other_way_round() -> None:
    plain = {"src": ["q"], "tgt": ["a"]}
    assert isinstance(found := read(plain), RowProblem)
    assert "`response` is missing" in found.reason
    assert isinstance(found := read({"instruction": "i", "output": "o"}, "alpaca"), RowProblem)
    assert "`chosen` is missing" in found.reason
    assert isinstance(other := parse(json.dumps(ROW).encode(), 1, "f", "erniekit"), RowProblem)
    assert "stage: DPO" in other.reason


@pytest.mark.parametrize(
    ("row", "format"),
    [
        (ROW, "erniekit"),
        ({"instruction": "i", "chosen": "a", "rejected": "b"}, "alpaca"),
        ({"question": "i", "chosen": ["a", "u", "a"], "rejected": "b"}, "alpaca"),
        ({"messages": [user("q")], "chosen": "a", "rejected": "b"}, "messages"),
        ({"prompt": "q", "chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]}, "messages"),
    ],
)
def test_preference_files_are_detected_and_what_was_detected_reads_them(row: dict, format: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{\n" + f"{json.dumps(row)}\n" * 3)
    found = detect(path)
    assert (found.format, found.preference) == (format, True)
    assert "stage: DPO" in found.why
    assert isinstance(read(row, found.format), Preference)


def test_a_file_of_mostly_plain_rows_is_not_preference_data(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in (ROW, {"src": "q", "tgt": "a"}, {"src": "q", "tgt": "b"}))
    )
    assert not detect(path).preference


def test_the_data_command_shows_what_is_compared_and_lists_bad_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = {**ROW, "response": [["good", "go on", "better"], ["bad", "go on", "worse"]]}
    path = tmp_path / "a.jsonl"
    rows = [LATER, turns, {**ROW, "response": ["same", "same"]}, {**ROW, "sort": [2, 2]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert data_command([str(path)]) == 1
    out = capsys.readouterr().out
    assert "4 rows, 3 preference pairs, 1 bad row" in out
    assert "prompt 1 (to 6), chosen 4 (to 15), rejected 4 (to 13); chosen is longer in 67%" in out
    assert "earlier turns in 1 prompt: they are read, not scored" in out
    assert "answers of several turns in 1 pair: the assistant's are scored" in out
    assert "two equal answers in 1 pair, which training leaves out" in out
    assert "chosen    good" in out
    assert f"{path}:4: `sort` gives both responses 2" in out
    assert data_command(["--type", "alpaca", str(path)]) == 1
    assert "4 bad rows" in capsys.readouterr().out


def test_two_thousand_mutated_pairs_raise_nothing() -> None:
    rng = random.Random(11)
    whole = {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]}
    asked = {"instruction": "i", "chosen": "a", "rejected": ["b", "u", "c"], "history": [["a", "b"]], "score_delta": 2}
    seeds = [json.dumps(row).encode() for row in (ROW, LATER, whole, asked)]
    words = [b"null", b"{}", b"[]", b"-1", b"1e999", b"NaN", b'""', b"true", b"\\ud800", b"\xff", b'"', b"[", b"[1]"]
    kinds = set()
    for _ in range(2000):
        line = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 5)):
            at, width = rng.randrange(len(line)), rng.randint(0, 8)
            line[at : at + width] = rng.choice(words) if rng.random() < 0.7 else bytes([rng.randrange(256)])
        for format in PREFERENCE_FORMATS:
            found = parse_pair(bytes(line), 1, "f", format)
            kinds.add(found.kind if isinstance(found, RowProblem) else "ok")
            assert isinstance(found, Preference) or found.reason
    assert {"ok", "bad_json", "bad_utf8", "missing_field", "wrong_type", "empty_text", "length_mismatch"} <= kinds
