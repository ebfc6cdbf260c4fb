"""Many runs at a time against one after another: the same ids, in few calls, for every kind of tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from erniekit.data import tokenizer as module
from erniekit.data.template import PromptTooLong, _Rendering, prompt_ids
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import ChatMessage, Conversation
from support.small_tokenizers import KINDS, make


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, paddle: Path, tmp_path: Path) -> Tokenizer:
    return make(request.param, paddle, tmp_path / "t")


def one_by_one(tokenizer: Tokenizer, parts: Sequence[Sequence[tuple[str, bool]]]) -> list[list[int]]:
    """The definition: a call of the vocabulary for each run and each cut."""
    out: list[list[int]] = []
    last: int | None = None

    def encode(text: str, prefix: bool) -> list[int]:
        ids = tokenizer.vocabulary.encode_many([(text, prefix)])[0]
        if tokenizer._forbidden.isdisjoint(ids):
            return ids
        cut: list[int] = []
        start = at = 0
        while found := tokenizer.special_pattern.search(text, at):
            at = found.start() + 1
            cut += tokenizer.vocabulary.encode_many([(text[start:at], prefix and not start)])[0]
            start = at
        return cut + tokenizer.vocabulary.encode_many([(text[start:], prefix and not start)])[0]

    for spans in parts:
        ids: list[int] = []
        for piece in tokenizer._pieces(spans):
            before = ids[-1] if ids else last
            ids += [piece] if isinstance(piece, int) else encode(piece, tokenizer._prefix_after(before))
        out.append(ids)
        last = ids[-1] if ids else last
    return out


WORDS = [
    "river",
    " quiet",
    "\n",
    "  ",
    "</s>",
    "<s>",
    "<mask:1>",
    "<tool>",
    "<|x|>",
    "</s",
    "<",
    "山",
    "😀",
    "\x00",
    "",
]


def test_runs_encoded_together_give_the_ids_of_runs_encoded_alone(tokenizer: Tokenizer, monkeypatch) -> None:
    luck = random.Random(5)
    clashes = 0
    for batch in (1, 40, 65_536):
        monkeypatch.setattr(module, "BATCH", batch)
        for _ in range(100):
            parts = [
                [("".join(luck.choices(WORDS, k=luck.randrange(4))), luck.random() < 0.5) for _ in range(3)]
                for _ in range(luck.randrange(1, 6))
            ]
            assert list(tokenizer.encode_parts(parts)) == one_by_one(tokenizer, parts), parts
            clashes += any("</s>" in text for part in parts for text, template in part if not template)
    assert clashes > 20


def shielded_by_search(text: str, tokenizer: Tokenizer, mark: str) -> str:
    out, at = [], 0
    while found := tokenizer.special_pattern.search(text, at):
        out.append(text[at : found.start() + 1])
        at = found.start() + 1
    return mark.join([*out, text[at:]])


def test_each_control_string_is_cut_behind_its_first_character(tokenizer: Tokenizer) -> None:
    luck = random.Random(6)
    bits = [*WORDS, *list(tokenizer.special_ids)[:6], "<<", "</", "s>", ">"]
    for _ in range(500):
        text = "".join(luck.choices(bits, k=luck.randrange(8)))
        ready = _Rendering(Conversation((ChatMessage("user", text),)), tokenizer)
        assert ready.messages[0].content == shielded_by_search(text, tokenizer, ready.mark), text


@pytest.mark.parametrize("unit", ["</s>", "<mask:1>", "</s", "<|im_end|>", "</s>x<s "])
def test_a_text_full_of_control_strings_takes_few_calls_and_no_more_characters(
    unit: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = tokenizer.vocabulary.encode_many
    monkeypatch.setattr(
        tokenizer.vocabulary, "encode_many", lambda runs: calls.append(sum(len(t) for t, _ in runs)) or real(runs)
    )
    text = unit * (20_000 // len(unit))
    prompt_ids([ChatMessage("user", text)], tokenizer)
    assert len(calls) <= 4
    assert sum(calls) < 2.5 * len(text)


def test_a_prompt_that_cannot_fit_is_known_before_it_is_encoded(tokenizer: Tokenizer, monkeypatch) -> None:
    calls: list[int] = []
    real = tokenizer.vocabulary.encode_many
    monkeypatch.setattr(tokenizer.vocabulary, "encode_many", lambda runs: calls.append(len(runs)) or real(runs))
    with pytest.raises(PromptTooLong) as error:
        prompt_ids([ChatMessage("user", "the river " * 10_000)], tokenizer, most=50)
    assert error.value.tokens > 50
    assert not calls


def test_many_messages_are_encoded_only_until_there_are_too_many(tokenizer: Tokenizer, monkeypatch) -> None:
    sizes: list[int] = []
    real = tokenizer.vocabulary.encode_many
    monkeypatch.setattr(
        tokenizer.vocabulary, "encode_many", lambda runs: sizes.append(sum(len(t) for t, _ in runs)) or real(runs)
    )
    monkeypatch.setattr(module, "BATCH", 1000)
    talk = [ChatMessage(("user", "assistant")[k % 2], "the quiet river") for k in range(2001)]
    whole = prompt_ids(talk, tokenizer)
    sizes.clear()
    with pytest.raises(PromptTooLong):
        prompt_ids(talk, tokenizer, most=len(whole) // 8)
    assert sum(sizes) < 30_000 // 4
    assert prompt_ids(talk, tokenizer, most=len(whole)) == whole
