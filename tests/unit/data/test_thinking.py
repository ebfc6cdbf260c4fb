"""Thoughts: read under every name, rendered by the template, trained by train_thinking, split as a server does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from erniekit.data.assemble import Assembled, Dropped, assemble
from erniekit.data.formats import parse, parse_pair
from erniekit.data.preference import PairRules
from erniekit.data.preference_assemble import assemble_pair
from erniekit.data.template import prompt_ids, turns
from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from erniekit.data.types import IGNORE, ChatMessage, Conversation, RowProblem
from erniekit.serve.output_parser import OutputParser
from support.jsonl import write_jsonl

E = "<|end_of_sentence|>"
# As thinking models have it: thoughts before the last question are left out, and the prompt may open the thought.
KNOWS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' and m.reasoning_content "
    "and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}" + E +
    "\n{% endfor %}{% if add_generation_prompt %}assistant: {{ '<think>\n' if enable_thinking }}{% endif %}"
)  # fmt: skip
FORGETS = KNOWS.replace("m.reasoning_content and", "m.reasoning_content and m.content == 'never' and")


@pytest.fixture
def with_template(paddle: Path, tmp_path: Path):
    def make(text: str) -> Tokenizer:
        shutil.copytree(paddle / "tokenizer", tmp_path / "t", dirs_exist_ok=True)
        (tmp_path / "t" / "chat_template.jinja").write_text(text)
        return load_tokenizer(tmp_path / "t")

    return make


def row(**answer: object) -> dict:
    asked = {"role": "user", "content": "the harbor?"}
    return {"messages": [asked, {"role": "assistant", "content": "copper", **answer}]}


def one(given: dict, compat: bool = False) -> Conversation:
    found = parse(json.dumps(given).encode(), 1, "f", "messages", compat)
    assert isinstance(found, list), found
    return found[0]


def problem(given: dict) -> str:
    found = parse(json.dumps(given).encode(), 1, "f", "messages")
    assert isinstance(found, RowProblem)
    return found.kind


def shown(tokenizer: Tokenizer, conversation: Conversation, rule: str = "all", length: int = 512) -> tuple[str, str]:
    """What is read, and what of it is trained."""
    made = assemble(conversation, tokenizer, length, thinking=rule)
    assert isinstance(made, Assembled), made
    ids, labels = made.sample.ids.tolist(), made.sample.labels.tolist()
    return tokenizer.decode(ids, skip_special=False), tokenizer.decode([x for x in labels if x != IGNORE])


@pytest.mark.parametrize(
    "answer",
    [
        {"reasoning_content": "quiet river"},
        {"reasoning": " quiet river\n"},
        {"thinking": "<think>quiet river</think>"},
        {"reasoning_content": "quiet river", "reasoning": "quiet river", "thinking": None},
        {"content": [{"type": "thinking", "thinking": "quiet river"}, {"type": "text", "text": "copper"}]},
        {"content": [{"type": "reasoning", "text": "quiet river"}, {"type": "text", "text": "copper"}]},
        {"content": "<think>quiet river</think>copper", "reasoning_content": "quiet river"},
    ],
)
def test_a_thought_is_read_under_every_name(answer: dict) -> None:
    said = one(row(**answer)).messages[1]
    assert (said.thought, said.content) == ("quiet river", "copper")
    assert one(row(**answer)).unused == ()


def test_thoughts_that_cannot_be_right_are_bad_rows() -> None:
    assert problem(row(reasoning_content="a", thinking="b")) == "two_thoughts"
    assert problem(row(reasoning_content="a", content="<think>b</think>c")) == "two_thoughts"
    assert problem(row(reasoning_content="a </think> b")) == "bad_thought"
    assert problem(row(reasoning_content={"text": "a"})) == "wrong_type"
    assert problem(row(reasoning_content="a", content="")) == "empty_text"


def test_the_models_own_template_renders_the_thought(with_template) -> None:
    tokenizer = with_template(KNOWS)
    read, trained = shown(tokenizer, one(row(reasoning_content="quiet river")))
    assert read == f"user: the harbor?{E}\nassistant: <think>\nquiet river\n</think>\n\ncopper"
    assert trained == "quiet river\n</think>\n\ncopper"  # the prompt that asks for thoughts ends in <think>


def test_a_template_without_thoughts_gets_them_between_the_tags_the_server_splits_at(tokenizer: Tokenizer) -> None:
    conversation = one(row(reasoning_content="quiet river"))
    _, trained = shown(tokenizer, conversation)
    assert trained == "<think>\nquiet river\n</think>\n\ncopper"
    parts = OutputParser().add(trained, last=True)
    assert {d.kind: d.text for d in parts} == {"reasoning": "quiet river", "content": "copper"}
    inline = Conversation((conversation.messages[0], ChatMessage("assistant", trained)))
    assert turns(conversation, tokenizer) == turns(inline, tokenizer)


def test_the_prompt_of_a_thinking_row_is_the_one_a_server_sends(with_template) -> None:
    tokenizer = with_template(KNOWS)
    [turn] = turns(one(row(reasoning_content="quiet river")), tokenizer)
    asked = [{"role": "user", "content": "the harbor?"}]
    assert turn.query_ids == prompt_ids(asked, tokenizer, variables={"enable_thinking": True})
    [plain] = turns(one(row()), tokenizer)
    assert plain.query_ids == prompt_ids(asked, tokenizer)


@pytest.mark.parametrize("known", [True, False])
def test_the_key_decides_what_is_trained(known: bool, with_template, tokenizer: Tokenizer) -> None:
    used = with_template(KNOWS) if known else tokenizer
    conversation = one(row(reasoning_content="quiet river"))
    everything = shown(used, conversation)
    assert "quiet river" in everything[1]
    assert shown(used, conversation, "last") == everything
    read, trained = shown(used, conversation, "mask")
    assert read == everything[0]
    assert trained.strip() == "copper"
    read, trained = shown(used, conversation, "drop")
    assert "quiet river" not in read
    assert trained == "copper"


@pytest.mark.parametrize("field", ["reasoning_content", None])
def test_last_keeps_the_last_answers_thought_only(field: str | None, tokenizer: Tokenizer) -> None:
    def answer(thought: str) -> dict:
        said = {field: thought} if field else {"content": f"<think>{thought}</think>copper"}
        return {"role": "assistant", "content": "copper", **said}

    asked = {"role": "user", "content": "the harbor?"}
    conversation = one({"messages": [asked, answer("lantern"), asked, answer("quiet river")]})
    read, trained = shown(tokenizer, conversation, "last")
    assert "lantern" not in read
    assert "quiet river" in trained
    assert trained.count("copper") == 2
    made = assemble(conversation, tokenizer, 512, thinking="last")
    assert (made.thoughts, made.thoughts_in) == (2, 1)
    both = assemble(conversation, tokenizer, 512)
    assert (both.thoughts, both.thoughts_in) == (2, 2)
    assert both.thought_tokens > made.thought_tokens > 4
    assert "lantern" in shown(tokenizer, conversation)[1]


def test_a_template_that_drops_earlier_thoughts_trains_the_last_answer_and_says_so(with_template) -> None:
    said = row(reasoning_content="lantern")["messages"] + row(reasoning_content="quiet river")["messages"]
    made = assemble(one({"messages": said}), with_template(KNOWS), 512)
    assert isinstance(made, Assembled)
    assert (made.thoughts, made.thoughts_in, made.rewritten_turns) == (2, 1, 1)
    read, trained = shown(with_template(KNOWS), one({"messages": said}))
    assert "lantern" not in read
    assert trained.startswith("quiet river")


def test_a_template_that_leaves_the_thought_out_drops_the_row_by_name(with_template) -> None:
    tokenizer = with_template(FORGETS.replace("{{ '<think>\n' if enable_thinking }}", ""))
    made = assemble(one(row(reasoning_content="quiet river")), tokenizer, 512)
    assert isinstance(made, Dropped)
    assert made.kind == "thought"
    assert "train_thinking" in made.reason
    assert shown(tokenizer, one(row(reasoning_content="quiet river")), "drop")[1] == "copper"


def test_control_strings_in_a_thought_stay_text(tokenizer: Tokenizer) -> None:
    [turn] = turns(one(row(reasoning_content=f"quiet {E}</s> river")), tokenizer)
    assert turn.answer_ids.count(tokenizer.end_id) == 1
    assert tokenizer.eos_id not in turn.answer_ids


def test_under_compat_a_thought_is_not_read_and_is_named(tokenizer: Tokenizer) -> None:
    given = row(reasoning_content="quiet river")
    assert one(given, compat=True) == one(row(), compat=True)
    assert one(given, compat=True).unused == ("messages[].reasoning_content",)


def test_thoughts_of_a_pair_are_scored_or_masked(tokenizer: Tokenizer) -> None:
    given = {
        "prompt": "the harbor?",
        "chosen": [{"role": "assistant", "content": "copper", "reasoning_content": "quiet river"}],
        "rejected": [{"role": "assistant", "content": "lantern", "reasoning_content": "the lamp"}],
    }
    pair = parse_pair(json.dumps(given).encode(), 1, "f", "messages")

    def scored(rule: str) -> str:
        made = assemble_pair(pair, tokenizer, 512, PairRules(512), thinking=rule)
        assert isinstance(made, Assembled)
        return tokenizer.decode([x for x in made.sample.labels.tolist() if x != IGNORE])

    assert "quiet river" in scored("all")
    assert "the lamp" in scored("all")
    masked = scored("mask")
    assert "river" not in masked
    assert "lamp" not in masked
    assert "copper" in masked
    assert "lantern" in masked
    assert "<think>" not in scored("drop")


def test_the_report_counts_thoughts_and_another_rule_is_another_cache(opened, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [row(reasoning_content=f"quiet river {i}") for i in range(3)] + [row()])
    all_, mask = (opened(path, thinking=rule) for rule in ("all", "mask"))
    assert (all_.report.thoughts, all_.report.thoughts_in) == (3, 3)
    assert mask.folder != all_.folder
    assert mask.report.trained_tokens == all_.report.trained_tokens - all_.report.thought_tokens
    assert any("thoughts: 3 of 3" in line and "not trained" in line for line in mask.report.lines())
    again = opened(path, thinking="mask").report
    assert again.from_cache
    assert again.lines()[1:] == mask.report.lines()[1:]
    gone = opened(path, thinking="drop").report
    assert any("thoughts: 0 of 3" in line and "3 left out by train_thinking" in line for line in gone.lines())
