"""Text as tokens arrive: characters whole, stop words unseen."""

from __future__ import annotations

import io
import json
import random

import pytest
import sentencepiece
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.trainers

from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from erniekit.serve.detokenizer import Detokenizer, StopStrings, partial_match


def test_a_character_of_several_tokens_is_shown_when_it_is_whole(paddle):
    tokenizer = load_tokenizer(paddle / "tokenizer")
    text = "say 😀 and 你好!"
    spelling = Detokenizer(tokenizer)
    shown = [spelling.add(id) for id in tokenizer.encode_text(text)]
    assert "".join(shown) + spelling.rest() == text
    assert all("\ufffd" not in piece for piece in shown)
    assert "" in shown, "the emoji is one token here: nothing was tested"


def test_half_a_character_at_the_end_is_shown_as_what_it_is(paddle):
    tokenizer = load_tokenizer(paddle / "tokenizer")
    spelling = Detokenizer(tokenizer)
    assert "".join(spelling.add(id) for id in tokenizer.encode_text("😀")[:-1]) == ""
    assert "\ufffd" in spelling.rest()


@pytest.mark.parametrize("seed", range(5))
def test_tokens_that_come_together_add_up_to_the_same_text(paddle, seed):
    tokenizer, rng = load_tokenizer(paddle / "tokenizer"), random.Random(seed)
    text = "say 😀 and 你好! then 😀😀 go  on\n twice"
    ids, spelling, shown = tokenizer.encode_text(text), Detokenizer(tokenizer), ""
    while ids:
        count = rng.randrange(1, 6)
        shown += spelling.add(*ids[:count])
        ids = ids[count:]
    assert shown + spelling.rest() == text
    assert "\ufffd" not in shown


@pytest.fixture(scope="module", params=["sentencepiece", "metaspace"])
def llama(request, tmp_path_factory) -> Tokenizer:
    """Llama's two forms: a blank stands before the first word, and is dropped wherever decoding begins."""
    folder = tmp_path_factory.mktemp("llama")
    words = ["the river copper hello"] * 50
    if request.param == "sentencepiece":
        out = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(words), model_writer=out, vocab_size=300, model_type="bpe", byte_fallback=True,
            remove_extra_whitespaces=False, normalization_rule_name="identity", hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
        (folder / "tokenizer.model").write_bytes(out.getvalue())
    else:
        engine = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
        engine.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        parts = tokenizers.decoders
        engine.decoder = parts.Sequence(
            [parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)]
        )
        special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
        engine.train_from_iterator(words, trainer)
        told = json.loads(engine.to_str())
        told["added_tokens"] = told["added_tokens"][:3]  # the bytes are plain vocabulary
        (folder / "tokenizer.json").write_text(json.dumps(told))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "legacy": false}')
    return load_tokenizer(folder)


def test_a_control_token_between_two_words_costs_no_blank(llama):
    words = llama.encode_text("river copper")
    at = len(llama.encode_text("river"))
    spelling = Detokenizer(llama)
    ids = [*words[:at], llama.eos_id, llama.eos_id, *words[at:]]
    assert "".join(map(spelling.add, ids)) + spelling.rest() == "river copper"
    assert spelling.ids == ids


def test_pieces_add_up_to_the_whole_wherever_control_tokens_and_unknown_ids_stand(llama):
    luck, text = random.Random(4), "the river  copper 你好 hello\n the 😀 river"
    for _ in range(200):
        ids = llama.encode_text(text)
        for _ in range(luck.randint(0, 6)):
            ids.insert(luck.randint(0, len(ids)), luck.choice([llama.eos_id, llama.bos_id, llama.vocab_size + 1]))
        spelling = Detokenizer(llama)
        assert "".join(map(spelling.add, ids)) + spelling.rest() == llama.decode(ids) == text


def test_a_stop_word_is_found_across_pieces_and_what_only_began_like_one_is_shown():
    words = StopStrings(["END", "STOP"])
    assert [words.add(piece) for piece in ("a E", "N", "x S", "TO")] == ["a ", "", "ENx ", ""]
    assert words.add("P later") == ""
    assert words.hit == "STOP"
    assert words.add("more", last=True) == ""


def test_what_was_held_back_comes_at_the_end():
    words = StopStrings(["END"])
    assert words.add("the EN") == "the "
    assert words.add("", last=True) == "EN"
    assert words.hit is None


def test_the_earliest_of_several_stop_words_counts():
    words = StopStrings(["later", "now"])
    assert words.add("so now or later") == "so "
    assert words.hit == "now"


def test_the_tail_that_may_become_a_word():
    assert partial_match("abc<to", ["<tool>"]) == 3
    assert partial_match("abc", ["<tool>"]) == 0
    assert partial_match("<", []) == 0
