"""Pairs against the recorded Paddle rows, and what is ours: where the rejected answer begins, fitting, scoring."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from erniekit.data.assemble import Assembled, Dropped
from erniekit.data.formats import parse_pair
from erniekit.data.preference import PairRules, PairSample, Preference
from erniekit.data.preference_assemble import assemble_pair
from erniekit.data.template import prompt_ids, turns
from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from erniekit.data.types import IGNORE, ChatMessage, Conversation, RowProblem

LENGTH = 160


@pytest.fixture(scope="module")
def ernie(paddle: Path) -> Tokenizer:
    return load_tokenizer(paddle / "tokenizer")


def recorded(paddle: Path, name: str) -> list[dict]:
    told = json.loads((paddle / "data_dpo.json").read_text())
    return [{"row": source["row"], **result} for source, result in zip(told["rows"], told[name])]


def preference(*texts: str, chosen: str | list[str] = "good", rejected: str | list[str] = "bad", system: str = ""):
    """Prompt texts of user and assistant in turn."""
    prompt = [ChatMessage("system", system)] if system else []
    prompt += [ChatMessage("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]
    answers = [
        tuple(
            ChatMessage("user" if i % 2 else "assistant", text)
            for i, text in enumerate(([said], said)[type(said) is list])
        )
        for said in (chosen, rejected)
    ]
    return Preference(tuple(prompt), *answers)


def made(pair: Preference, tokenizer: Tokenizer, length: int = LENGTH, prompt: int = 1000, **options) -> Assembled:
    mask = options.pop("mask_out_eos_token", True)
    found = assemble_pair(pair, tokenizer, length, PairRules(prompt, mask), **options)
    assert isinstance(found, Assembled), found
    return found


def sample(*args, **options) -> PairSample:
    found = made(*args, **options).sample
    assert isinstance(found, PairSample)
    return found


def sequences(pair: PairSample) -> list[tuple[list[int], list[int]]]:
    """The two plain sequences a pair stands for: (ids, labels) each, labels of the shared places none."""
    ids, labels = pair.ids.tolist(), pair.labels.tolist()
    cut = pair.rejected
    return [
        (ids[:cut], labels[:cut]),
        (ids[: pair.shared] + ids[cut:], [IGNORE] * pair.shared + labels[cut:]),
    ]


def words(ids: list[int], tokenizer: Tokenizer) -> str:
    return tokenizer.decode([id for id in ids if id != IGNORE])


@pytest.mark.parametrize(("name", "masked"), [("rows", False), ("rows_mask_out_eos_token", True)])
def test_compat_rows_are_the_recorded_ones_token_for_token(paddle, ernie, name, masked):
    seen = 0
    for row in recorded(paddle, name):
        pair = parse_pair(json.dumps(row["row"]).encode(), 1, "f", "erniekit", compat=True)
        if "invalid" in row:
            assert isinstance(pair, RowProblem)
            continue
        assert isinstance(pair, Preference)
        # max_prompt_len: ERNIEKit has it and does not use it
        got = sample(pair, ernie, LENGTH, prompt=5, mask_out_eos_token=masked, compat=True)
        expected, count = row["result"], len(got.ids)
        assert got.ids.tolist() == expected["input_ids"]
        places = np.arange(count)
        positions = np.where(places < got.rejected, places, places - got.rejected + got.shared)
        assert positions.tolist() == expected["position_ids"]
        plain = np.where(got.labels == IGNORE, 0, got.labels)
        assert np.where(places < got.scored, plain, 0).tolist() == expected["chosen_labels"]
        assert np.where(places >= got.scored, plain, 0).tolist() == expected["rejected_labels"]
        ends = [0, int((got.labels[: got.scored] != IGNORE).sum()), int((got.labels != IGNORE).sum())]
        assert ends == expected["response_index"]
        start = np.where((places >= got.shared) & (places < got.rejected), got.rejected, count)
        assert start.tolist() == expected["attn_mask_start_row_indices"]
        assert got.score_delta == 1.0
        seen += 1
    assert seen == 8


def test_both_sequences_are_what_sft_would_make_of_prompt_and_answer(ernie):
    pair = preference("a river", "the harbor", "and now?", chosen="copper 12", rejected="a lantern", system="Be warm.")
    got = sample(pair, ernie, mask_out_eos_token=False)
    for answer, (ids, labels) in zip((pair.chosen, pair.rejected), sequences(got)):
        said = turns(Conversation(pair.prompt + answer), ernie)
        whole = [id for turn in said for id in turn.query_ids + turn.answer_ids]
        assert ids == whole[:-1]
        count = len(said[-1].answer_ids)
        assert labels == [IGNORE] * (len(ids) - count) + [*said[-1].answer_ids[:-1], ernie.eos_id]
    assert got.ids.tolist()[: got.shared + 1] == prompt_ids(pair.prompt, ernie)
    assert got.scored == got.rejected


def test_the_first_rejected_token_is_predicted_from_the_prompt_not_from_the_chosen_answer(ernie):
    got = sample(preference("a river", chosen="copper", rejected="lantern"), ernie)
    assert got.ids[got.rejected] == got.ids[got.shared] == prompt_ids([ChatMessage("user", "a river")], ernie)[-1]
    assert got.labels[got.rejected] != IGNORE
    old = sample(preference("a river", chosen="copper", rejected="lantern"), ernie, compat=True)
    assert old.labels[old.rejected - 1] == got.labels[got.rejected]  # ERNIEKit: after the chosen answer's end
    assert old.ids[old.rejected - 1] == ernie.end_id


def test_the_end_token_is_scored_only_if_asked_for_and_then_as_eos(ernie):
    pair = preference("a river", chosen="copper", rejected="lantern")
    masked, scored = (sample(pair, ernie, mask_out_eos_token=mask) for mask in (True, False))
    np.testing.assert_array_equal(masked.ids, scored.ids)
    different = np.flatnonzero(masked.labels != scored.labels)
    assert different.tolist() == [scored.rejected - 1, len(scored.ids) - 1]
    assert scored.labels[different].tolist() == [ernie.eos_id] * 2
    assert masked.labels[different].tolist() == [IGNORE] * 2
    old = sample(pair, ernie, mask_out_eos_token=False, compat=True)
    assert (old.labels == ernie.end_id).sum() == 2  # ERNIEKit keeps the end token


@pytest.mark.parametrize("compat", [False, True])
def test_an_answer_of_several_turns_is_scored_on_what_the_assistant_says(ernie, compat):
    pair = preference(
        "hi", chosen=["copper", "and then?", "harbor"], rejected=["lantern", "but why?", "signal", "?", "x"]
    )
    got = sample(pair, ernie, compat=compat)
    labels = got.labels.tolist()
    chosen, rejected = (words(part, ernie) for part in (labels[: got.scored], labels[got.scored :]))
    assert (chosen, rejected) == ("copperharbor", "lanternsignalx")
    inputs = [words(ids, ernie) for ids, _ in sequences(got)]
    assert "and then?" in inputs[0]
    assert "and then?" not in inputs[1]
    assert "but why?" in inputs[1]


def test_older_turns_go_whole_and_from_the_oldest_until_the_pair_fits(ernie):
    texts = [f"{word} {i}" for i, word in enumerate(["river", "copper", "lantern", "harbor", "signal", "walnut"])]
    pair = preference(*texts, "and now?", system="Be warm.")
    whole = len(sample(pair, ernie).ids)
    sizes = {}
    for length in range(whole, 0, -1):
        found = assemble_pair(pair, ernie, length, PairRules(1000))
        if isinstance(found, Dropped):
            assert found.kind == "overlong"
            break
        assert len(found.sample.ids) <= length
        sizes.setdefault(found.dropped_turns, (length, found.sample))
    assert list(sizes) == [0, 1, 2, 3]
    for dropped, (_, kept) in sizes.items():
        text = words(kept.ids.tolist(), ernie)
        assert [said in text for said in texts] == [i >= 2 * dropped for i in range(6)]
        assert ("Be warm" in text) == (dropped == 0)
        assert kept.ids[0] == ernie.begin_id
        assert "and now?" in text
    # the first length at which a turn goes is one where it did not fit
    assert all(length == len(kept.ids) or dropped for dropped, (length, kept) in sizes.items())
    assert sizes[1][0] == whole - 1


def test_the_old_reader_drops_the_begin_token_with_the_oldest_turn(ernie):
    pair = preference("river", "copper", "lantern")
    whole = len(sample(pair, ernie, compat=True).ids)
    cut = made(pair, ernie, whole - 1, compat=True)
    assert cut.dropped_turns == 1
    assert cut.sample.ids[0] != ernie.begin_id


def test_max_prompt_len_drops_older_turns_and_then_the_pair(ernie):
    pair = preference("river", "copper", "lantern")
    prompt = len(prompt_ids(pair.prompt, ernie))
    assert made(pair, ernie, prompt=prompt).dropped_turns == 0
    shorter = made(pair, ernie, prompt=prompt - 1)
    assert shorter.dropped_turns == 1
    left = shorter.sample.shared + 1
    assert made(pair, ernie, prompt=left).dropped_turns == 1
    for overlong in ("drop", "truncate"):
        gone = assemble_pair(pair, ernie, LENGTH, PairRules(left - 1), overlong)
        assert isinstance(gone, Dropped)
        assert gone.kind == "overlong"
        assert "max_prompt_len" in gone.reason
    assert made(pair, ernie, prompt=1, compat=True).dropped_turns == 0


def test_a_pair_fits_exactly_or_not_at_all(ernie):
    pair = preference("river", chosen="copper " * 6, rejected="walnut " * 9)
    for compat in (False, True):
        exact = len(sample(pair, ernie, compat=compat).ids)
        assert len(sample(pair, ernie, exact, compat=compat).ids) == exact
        gone = assemble_pair(pair, ernie, exact - 1, PairRules(1000), compat=compat)
        assert isinstance(gone, Dropped)
        assert gone.kind == "overlong"


@pytest.mark.parametrize("counts", [(5, 60), (60, 5), (40, 50)])
def test_truncate_cuts_the_longer_answer_first_and_keeps_both(ernie, counts):
    pair = preference("old river", "harbor", "river", chosen="copper " * counts[0], rejected="walnut " * counts[1])
    alone = replace(pair, prompt=pair.prompt[-1:])
    whole = sample(alone, ernie)
    length = len(whole.ids) - 20
    found = made(pair, ernie, length, overlong="truncate")
    cut = found.sample
    assert (len(cut.ids), found.truncated_tokens, found.dropped_turns) == (length, 20, 1)
    before = [whole.rejected - whole.shared, len(whole.ids) - whole.rejected]
    after = [cut.rejected - cut.shared, len(cut.ids) - cut.rejected]
    shorter = int(before[0] > before[1])
    if max(before) - min(before) >= 20:
        assert after[shorter] == before[shorter]
    else:
        assert abs(after[0] - after[1]) <= 1
    for had, has, last in zip(before, after, (cut.labels[cut.rejected - 1], cut.labels[-1])):
        assert (last != IGNORE) == (has < had)  # a cut answer ends with a word, a whole one with its end token


def test_nothing_is_cut_to_nothing(ernie):
    pair = preference("river " * 5, chosen="copper", rejected="walnut")
    prompt = len(prompt_ids(pair.prompt, ernie))
    gone = assemble_pair(pair, ernie, prompt, PairRules(1000), "truncate")
    assert isinstance(gone, Dropped)
    least = sample(pair, ernie, prompt + 1, overlong="truncate")
    assert (least.labels != IGNORE).sum() == 2


def test_two_equal_answers_compare_nothing(ernie):
    pair = preference("river", chosen="copper", rejected="copper")
    gone = assemble_pair(pair, ernie, LENGTH, PairRules(1000))
    assert isinstance(gone, Dropped)
    assert gone.kind == "same_answers"
    assert len(sample(pair, ernie, compat=True).ids)  # ERNIEKit trains on it
    long = preference("river", chosen="copper " * 50 + "walnut", rejected="copper " * 50 + "signal")
    gone = assemble_pair(long, ernie, 60, PairRules(1000), "truncate")
    assert isinstance(gone, Dropped)
    assert "as far as they fit" in gone.reason


def other_template(paddle: Path, tmp_path: Path, template: str) -> Tokenizer:
    folder = tmp_path / "tokenizer"
    shutil.copytree(paddle / "tokenizer", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return load_tokenizer(folder)


def test_a_template_without_an_end_token_gets_eos(paddle, tmp_path):
    template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    tokenizer = other_template(paddle, tmp_path, template)
    pair = preference("river", chosen="copper", rejected="walnut")
    scored = sample(pair, tokenizer, mask_out_eos_token=False)
    assert [scored.labels[scored.rejected - 1], scored.labels[-1]] == [tokenizer.eos_id] * 2
    masked = sample(pair, tokenizer)
    assert [masked.labels[masked.rejected - 1], masked.labels[-1]] == [IGNORE] * 2
    assert masked.labels[masked.rejected - 2] != IGNORE


def test_a_template_that_rewrites_earlier_turns_scores_the_last_answers(paddle, tmp_path):
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}A(old){% elif m.role == 'assistant' %}"
        "Assistant: {{ m.content }}<|end_of_sentence|>{% else %}User: {{ m.content }} {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}Assistant: {% endif %}"
    )
    tokenizer = other_template(paddle, tmp_path, template)
    pair = preference("hi", "ho", "river", chosen="copper", rejected=["walnut", "why?", "signal"])
    got = sample(pair, tokenizer)
    labels = got.labels.tolist()
    assert words(labels[: got.scored], tokenizer) == "copper"
    assert words(labels[got.scored :], tokenizer) == "signal"
    chosen, rejected = (words(ids, tokenizer) for ids, _ in sequences(got))
    assert chosen.startswith("User: hi A(old)User: river Assistant: copper")
    assert rejected.startswith("User: hi A(old)User: river A(old)User: why? Assistant: signal")
    assert words(got.ids[: got.shared].tolist(), tokenizer).startswith("User: hi A(old)User: river")


def test_tools_are_in_the_prompt_and_the_last_answer_is_scored(ernie):
    tool = {"type": "function", "function": {"name": "weather"}}
    pair = replace(preference("rain?", chosen="yes", rejected="no"), tools=(tool,))
    got = sample(pair, ernie, 400)
    assert "weather" in words(got.ids[: got.shared].tolist(), ernie)
    assert words(got.labels[: got.scored].tolist(), ernie) == "yes"


def test_a_template_that_refuses_drops_the_pair_with_its_reason(paddle, tmp_path):
    tokenizer = other_template(paddle, tmp_path, "{{ raise_exception('no such roles') }}")
    gone = assemble_pair(preference("hi"), tokenizer, LENGTH, PairRules(1000))
    assert isinstance(gone, Dropped)
    assert gone.kind == "template"
    assert "no such roles" in gone.reason
