"""Rows of judged answers: every form they come in, what is refused, and whose answer goes behind whose prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from erniekit.data.formats.fields import BadRow
from erniekit.data.formats.unpaired import unpaired
from erniekit.data.preference import PairRules
from erniekit.data.types import IGNORE
from erniekit.data.unpaired_source import UnpairedSource, unpaired_rows
from erniekit.errors import DataError
from support.jsonl import write_jsonl

ASKED, SAID = "What is 1 + 1?", "It is 2."
FORMS = {
    "TRL's texts": {"prompt": ASKED, "completion": SAID, "label": True},
    "TRL's messages": {
        "prompt": [{"role": "user", "content": ASKED}],
        "completion": [{"role": "assistant", "content": SAID}],
        "label": True,
    },
    "alpaca with LLaMA-Factory's tag": {"instruction": ASKED, "input": "", "output": SAID, "kto_tag": True},
    "messages": {"messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}], "label": 1},
    "src and tgt": {"src": [ASKED], "tgt": [SAID], "label": "true"},
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_of_a_row_is_the_same_judged_answer(name):
    (row,) = unpaired(FORMS[name])
    assert [(m.role, m.content) for m in (*row.prompt, *row.answer)] == [("user", ASKED), ("assistant", SAID)]
    assert row.desirable is True
    assert row.unused == ()


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "chosen": SAID, "rejected": "It is 3."},
        {"instruction": ASKED, "chosen": SAID, "rejected": "It is 3."},
        {"src": [ASKED], "tgt": [], "response": ["It is 3.", SAID], "sort": [0, 1]},
        {
            "chosen": f"\n\nHuman: {ASKED}\n\nAssistant: {SAID}",
            "rejected": f"\n\nHuman: {ASKED}\n\nAssistant: It is 3.",
        },
        {
            "conversations": [{"from": "human", "value": ASKED}],
            "chosen": {"from": "gpt", "value": SAID},
            "rejected": {"from": "gpt", "value": "It is 3."},
        },
    ],
)
def test_a_preference_row_is_two_judged_answers(row):
    good, bad = unpaired(row)
    assert [message.content for message in good.prompt] == [ASKED]
    assert (good.answer[0].content, good.desirable) == (SAID, True)
    assert (bad.answer[0].content, bad.desirable) == ("It is 3.", False)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": ASKED, "completion": SAID}, "`label` is missing"),
        ({"prompt": ASKED, "completion": SAID, "label": "good"}, "`label` must be 0 or 1"),
        ({"src": [ASKED], "tgt": [SAID], "label": [1]}, "one verdict a row"),
        ({"prompt": ASKED, "label": True}, "`completion` is missing"),
        ({"completion": SAID, "label": True}, "`prompt` is missing"),
        ([ASKED], "a row must be an object"),
    ],
)
def test_what_is_wrong_with_a_row_is_named(row, says):
    with pytest.raises(BadRow, match=says):
        unpaired(row)


def source_of(folder: Path, opened: Callable, rows: list[dict]) -> UnpairedSource:
    rules = PairRules(max_prompt_len=64, mask_out_eos_token=False)
    return opened(write_jsonl(folder / "rows.jsonl", rows), pairs=rules, kind=unpaired_rows)


def test_an_answer_goes_behind_the_prompt_of_another_question(tmp_path, opened, tokenizer):
    rows = [{"prompt": f"Question {i // 2}?", "completion": f"Answer {i}.", "label": i % 2 == 0} for i in range(8)]
    source = source_of(tmp_path, opened, rows)
    for index in range(len(source)):
        sample = source.sample(index)
        mixed = tokenizer.decode(sample.mismatched.ids.tolist())
        question = rows[index]["prompt"]
        assert question in mixed
        answers = {r["completion"] for r in rows if r["prompt"] == question}
        assert not any(answer in mixed for answer in answers), "its own question's answers are no mismatch"
        assert sample.desirable == rows[index]["label"]
        assert sample.labels[-1] == IGNORE
        assert sample.labels[-2] == tokenizer.eos_id, "an answer is judged with its end"
    assert (source.report.samples, source.report.desirable) == (8, 4)
    assert any("4 answers are desirable, 4 are not" in line for line in source.report.lines())


def test_a_file_with_one_row_has_no_other_answer(tmp_path, opened):
    with pytest.raises(DataError, match="answers of other rows"):
        source_of(tmp_path, opened, [{"prompt": ASKED, "completion": SAID, "label": True}])
