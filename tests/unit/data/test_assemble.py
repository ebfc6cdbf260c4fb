"""Samples against the recorded Paddle rows, and what is ours: the fixed fault, truncation, counted drops."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from erniekit.data.assemble import Assembled, Dropped, assemble
from erniekit.data.formats import parse
from erniekit.data.template import prompt_ids, turns
from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from erniekit.data.types import IGNORE, ChatMessage, Conversation, RowProblem


@pytest.fixture(scope="module")
def ernie(paddle: Path) -> Tokenizer:
    return load_tokenizer(paddle / "tokenizer")


@pytest.fixture(scope="module")
def recorded(paddle: Path) -> dict:
    return json.loads((paddle / "data_sft.json").read_text())


def masked(result: dict) -> list[int]:
    return [label if mask else IGNORE for label, mask in zip(result["labels"], result["loss_mask"])]


def conversation(*texts: str, trained: tuple[int, ...] = (), system: str = "") -> Conversation:
    said = [ChatMessage("system", system)] if system else []
    for i in range(0, len(texts), 2):
        said.append(ChatMessage("user", texts[i]))
        said.append(ChatMessage("assistant", texts[i + 1], trained=bool(trained[i // 2]) if trained else True))
    return Conversation(tuple(said))


def test_recorded_rows_token_for_token_under_compat(ernie: Tokenizer, recorded: dict) -> None:
    outcomes = {"used": 0, "skipped": 0, "invalid": 0}
    for number, row in enumerate(recorded["sft_rows"]):
        found = parse(row["row"], number + 1, "rows.jsonl", "erniekit", compat=True)
        if "invalid" in row:
            assert isinstance(found, RowProblem), number
            outcomes["invalid"] += 1
            continue
        assert isinstance(found, list)
        got = assemble(found[0], ernie, recorded["max_seq_len"], compat=True)
        if row["result"] is None:
            assert isinstance(got, Dropped), number
            outcomes["skipped"] += 1
            continue
        assert isinstance(got, Assembled)
        assert got.sample.ids.tolist() == row["result"]["token_ids"], number
        assert got.sample.labels.tolist() == masked(row["result"]), number
        assert got.sample.ids.dtype == got.sample.labels.dtype == np.int32
        outcomes["used"] += 1
    assert outcomes == {"used": 16, "skipped": 3, "invalid": 3}


def test_recorded_alpaca_rows_token_for_token_under_compat(ernie: Tokenizer, recorded: dict) -> None:
    for number, (row, want) in enumerate(zip(recorded["alpaca_rows"], recorded["alpaca_eval_sequences"], strict=True)):
        [found] = parse(row, number + 1, "rows.json", "alpaca", compat=True)
        got = assemble(found, ernie, recorded["max_seq_len"], compat=True)
        assert isinstance(got, Assembled)
        assert got.sample.ids.tolist() == want["token_ids"]
        assert got.sample.labels.tolist() == masked(want)


def test_by_default_an_end_token_does_not_learn_the_next_user_turn(ernie: Tokenizer, recorded: dict) -> None:
    touched = []
    for number, row in enumerate(recorded["sft_rows"]):
        if not row.get("result"):
            continue
        [found] = parse(row["row"], number + 1, "rows.jsonl", "erniekit", compat=True)  # which strips white space
        got = assemble(found, ernie, recorded["max_seq_len"])
        assert isinstance(got, Assembled)
        assert got.sample.ids.tolist() == row["result"]["token_ids"]
        differs = np.flatnonzero(got.sample.labels != np.array(masked(row["result"])))
        assert all(got.sample.ids[differs] == ernie.end_id)
        assert all(got.sample.labels[differs] == IGNORE)
        touched += [number] * len(differs)
        # The end token itself stays a target, as eos, at the position before it.
        for i in differs:
            assert got.sample.labels[i - 1] == ernie.eos_id
    assert touched == [2, 5, 8, 21]  # the rows the fixtures' README names


def test_the_prompt_is_input_and_the_answer_with_its_end_is_trained(ernie: Tokenizer) -> None:
    talk = conversation("the quiet river", "the warm harbor")
    got = assemble(talk, ernie, 64)
    assert isinstance(got, Assembled)
    prompt = prompt_ids(talk.messages[:-1], ernie)
    assert got.sample.ids[: len(prompt)].tolist() == prompt
    answer = [*ernie.encode_text("the warm harbor"), ernie.eos_id]
    assert got.sample.labels.tolist() == [IGNORE] * (len(prompt) - 1) + answer


def test_older_turns_are_dropped_whole_counted_and_the_begin_token_restored(ernie: Tokenizer) -> None:
    talk = conversation("the quiet river", "the warm harbor", "the amber copper", "the river", system="Be brief.")
    said = turns(talk, ernie)
    newest = len(said[1].query_ids) + len(said[1].answer_ids)
    whole = newest + len(said[0].query_ids) + len(said[0].answer_ids)
    # A turn fits while its length <= max_seq_len + 1 - taken - 8; the first one taken counts as 1.
    assert assemble(talk, ernie, whole + 7).dropped_turns == 0
    cut = assemble(talk, ernie, whole + 6)
    assert cut.dropped_turns == 1
    assert cut.sample.ids.tolist() == [ernie.begin_id, *said[1].query_ids, *said[1].answer_ids[:-1]]
    assert isinstance(assemble(talk, ernie, newest + 8), Assembled)
    assert assemble(talk, ernie, newest + 7).kind == "overlong"


def test_truncate_cuts_the_newest_answer_and_trains_no_end_there(ernie: Tokenizer) -> None:
    talk = conversation("old", "older", "the quiet river", "the warm harbor " * 10)
    query, answer = turns(talk, ernie)[1].query_ids, turns(talk, ernie)[1].answer_ids
    assert assemble(talk, ernie, 30).kind == "overlong"
    got = assemble(talk, ernie, 30, overlong="truncate")
    room = 30 - 8 - len(query)
    assert got.sample.ids.tolist() == [ernie.begin_id, *query, *answer[: room - 1]]
    assert got.sample.labels.tolist() == [IGNORE] * len(query) + answer[:room]
    assert ernie.eos_id not in got.sample.labels
    assert (got.truncated_tokens, got.dropped_turns) == (len(answer) - room, 1)


def test_truncate_leaves_samples_that_fit_as_they_are(ernie: Tokenizer) -> None:
    talk = conversation("the quiet river", "the warm harbor")
    cut, plain = (assemble(talk, ernie, 64, overlong=mode) for mode in ("truncate", "drop"))
    assert cut.truncated_tokens == 0
    assert cut.sample.labels.tolist() == plain.sample.labels.tolist()


def test_a_question_that_does_not_fit_is_dropped_even_when_truncating(ernie: Tokenizer) -> None:
    got = assemble(conversation("the quiet river " * 20, "yes"), ernie, 30, overlong="truncate")
    assert isinstance(got, Dropped)
    assert got.kind == "overlong"
    assert "question alone" in got.reason


def test_samples_are_never_longer_than_max_seq_len(ernie: Tokenizer) -> None:
    talk = conversation("the river", "the harbor " * 30, "the copper " * 4, "the amber " * 9, "b", "c " * 12)
    for limit in range(20, 140):
        for mode in ("drop", "truncate"):
            got = assemble(talk, ernie, limit, overlong=mode)
            assert isinstance(got, Dropped) or len(got.sample.ids) == len(got.sample.labels) <= limit


def test_nothing_trained_is_dropped_with_its_cause(ernie: Tokenizer) -> None:
    assert assemble(conversation("a b c", "d e f", trained=(0,)), ernie, 64).kind == "untrained"
    talk = conversation("the quiet river", "the warm harbor", "the amber copper", "the river", trained=(1, 0))
    got = assemble(talk, ernie, 25)
    assert got.kind == "untrained"
    assert "1 older turn was dropped" in got.reason
    assert assemble(Conversation((ChatMessage("user", "a"),)), ernie, 64).kind == "untrained"


def test_nine_tokens_are_too_few(paddle: Path, tmp_path: Path) -> None:
    tokenizer = templated(paddle, tmp_path, "{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    nine, ten = conversation("1234", "123"), conversation("1234", "1234")
    assert assemble(nine, tokenizer, 64).kind == "too_short"
    assert isinstance(assemble(ten, tokenizer, 64), Assembled)


def test_a_template_without_end_token_still_teaches_where_to_stop(paddle: Path, tmp_path: Path) -> None:
    tokenizer = templated(paddle, tmp_path, "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    got = assemble(conversation("the quiet river " * 3, "the warm harbor " * 3), tokenizer, 64)
    assert got.sample.labels[-1] == tokenizer.eos_id
    assert tokenizer.begin_id not in got.sample.ids  # a template that opens with none gets none


def test_turns_a_rewriting_template_cannot_train_are_counted(paddle: Path, tmp_path: Path) -> None:
    rewriting = "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' }}<mask:4>{% endfor %}"
    tokenizer = templated(paddle, tmp_path, rewriting)
    got = assemble(conversation("the quiet river", "the harbor", "the amber copper", "the river"), tokenizer, 64)
    assert (got.rewritten_turns, got.dropped_turns) == (1, 0)
    assert got.sample.labels[got.sample.labels != IGNORE].tolist()[-1] == tokenizer.special_ids["<mask:4>"]


def test_a_template_that_refuses_is_a_drop_not_a_crash(paddle: Path, tmp_path: Path) -> None:
    tokenizer = templated(paddle, tmp_path, "{{ raise_exception('no') }}")
    assert assemble(conversation("a", "b"), tokenizer, 64) == Dropped("template", "the chat template refuses it: no")


def templated(paddle: Path, tmp_path: Path, template: str) -> Tokenizer:
    shutil.copytree(paddle / "tokenizer", tmp_path / "t")
    (tmp_path / "t" / "chat_template.jinja").write_text(template)
    return load_tokenizer(tmp_path / "t")
