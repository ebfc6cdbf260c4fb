"""Text as tokens arrive: characters whole, stop words unseen."""

from __future__ import annotations

from erniekit.data.tokenizer import load_tokenizer
from erniekit.serve.spelling import Spelling, StopWords, tail


def test_a_character_of_several_tokens_is_shown_when_it_is_whole(paddle):
    tokenizer = load_tokenizer(paddle / "tokenizer")
    text = "say 😀 and 你好!"
    spelling = Spelling(tokenizer)
    shown = [spelling.add(id) for id in tokenizer.encode_text(text)]
    assert "".join(shown) + spelling.rest() == text
    assert all("\ufffd" not in piece for piece in shown)
    assert "" in shown, "the emoji is one token here: nothing was tested"


def test_half_a_character_at_the_end_is_shown_as_what_it_is(paddle):
    tokenizer = load_tokenizer(paddle / "tokenizer")
    spelling = Spelling(tokenizer)
    assert "".join(spelling.add(id) for id in tokenizer.encode_text("😀")[:-1]) == ""
    assert "\ufffd" in spelling.rest()


def test_a_stop_word_is_found_across_pieces_and_what_only_began_like_one_is_shown():
    words = StopWords(["END", "STOP"])
    assert [words.add(piece) for piece in ("a E", "N", "x S", "TO")] == ["a ", "", "ENx ", ""]
    assert words.add("P later") == ""
    assert words.hit == "STOP"
    assert words.add("more", last=True) == ""


def test_what_was_held_back_comes_at_the_end():
    words = StopWords(["END"])
    assert words.add("the EN") == "the "
    assert words.add("", last=True) == "EN"
    assert words.hit is None


def test_the_earliest_of_several_stop_words_counts():
    words = StopWords(["later", "now"])
    assert words.add("so now or later") == "so "
    assert words.hit == "now"


def test_the_tail_that_may_become_a_word():
    assert tail("abc<to", ["<tool>"]) == 3
    assert tail("abc", ["<tool>"]) == 0
    assert tail("<", []) == 0
