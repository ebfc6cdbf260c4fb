"""A tokenizer as llama.cpp takes it. That it gives the same ids there is shown with llama.cpp itself (tests/parity)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentencepiece

from erniekit.data.tokenizer import load_tokenizer
from erniekit.errors import CheckpointError
from erniekit.export.gguf.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, vocabulary_fields
from support.small_tokenizers import make

KEY = "tokenizer.ggml."
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def test_pieces_of_a_sentencepiece_file_keep_their_ids_scores_and_kinds(tiny: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(tiny["ernie4_5"])
    fields = vocabulary_fields(tokenizer, 1300)
    engine = sentencepiece.SentencePieceProcessor(model_file=str(tiny["ernie4_5"] / "tokenizer.model"))
    kinds = dict(zip(fields[KEY + "tokens"], fields[KEY + "token_type"]))
    assert fields[KEY + "tokens"][:1280] == engine.id_to_piece(list(range(1280)))
    assert fields[KEY + "scores"][:1280] == [engine.get_score(id) for id in range(1280)]
    assert [kinds[t] for t in ("<unk>", "<s>", "<|begin_of_sentence|>", "\n", "<0x0A>", "▁the")] == [
        UNKNOWN, CONTROL, CONTROL, USER_DEFINED, BYTE, NORMAL,
    ]  # fmt: skip
    assert fields[KEY + "tokens"][1280:] == [f"[PAD{id}]" for id in range(1280, 1300)]
    assert fields[KEY + "token_type"][1280:] == [UNUSED] * 20
    assert fields[KEY + "add_space_prefix"] is False


def test_added_words_follow_the_pieces_and_ids_without_a_row_are_left_out(paddle: Path, tmp_path: Path) -> None:
    tokenizer = make("added words", paddle, tmp_path)
    size = tokenizer.vocab_size
    fields = vocabulary_fields(tokenizer, size)
    assert fields[KEY + "tokens"][-2:] == ["<tool>", "<|x|>"]
    assert fields[KEY + "token_type"][-2:] == [USER_DEFINED, CONTROL]
    fewer = vocabulary_fields(tokenizer, size - 1)
    assert len(fewer[KEY + "tokens"]) == len(fewer[KEY + "scores"]) == len(fewer[KEY + "token_type"]) == size - 1


def test_byte_level_bpe_has_merges_and_a_pre_tokeniser_by_name(paddle: Path, tmp_path: Path) -> None:
    tokenizer = make("byte level", paddle, tmp_path)
    fields = vocabulary_fields(tokenizer, tokenizer.vocab_size)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    assert (fields[KEY + "model"], fields[KEY + "pre"]) == ("gpt2", "gpt-2")
    assert [tuple(m.split(" ")) for m in fields[KEY + "merges"]] == [tuple(m) for m in state["model"]["merges"]]
    assert fields[KEY + "token_type"][fields[KEY + "bos_token_id"]] == CONTROL


@pytest.mark.parametrize(("ignore_merges", "name"), [(True, "llama-bpe"), (False, "smaug-bpe")])
def test_llama_3s_pattern_is_known_with_and_without_merges(paddle, tmp_path, ignore_merges, name):
    make("byte level", paddle, tmp_path)
    file = tmp_path / "tokenizer.json"
    state = json.loads(file.read_text())
    split = {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    state["model"]["ignore_merges"] = ignore_merges
    file.write_text(json.dumps(state))
    tokenizer = load_tokenizer(tmp_path)
    assert vocabulary_fields(tokenizer, tokenizer.vocab_size)[KEY + "pre"] == name
    split["pattern"]["Regex"] = r"\w+"
    file.write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="a pre-tokeniser") as error:
        vocabulary_fields(load_tokenizer(tmp_path), 400)
    assert error.value.where == str(file)


@pytest.mark.parametrize(("scheme", "prefix"), [("always", True), ("first", False)])
def test_ranked_merges_become_scores(paddle, tmp_path, capsys, scheme, prefix):
    tokenizer = make(f"byte fallback, {scheme}", paddle, tmp_path)
    fields = vocabulary_fields(tokenizer, tokenizer.vocab_size)
    scores = dict(zip(fields[KEY + "tokens"], fields[KEY + "scores"]))
    assert scores["</"] > scores["s>"] > scores["</s>"] > scores["a"]
    assert fields[KEY + "add_space_prefix"] is prefix
    assert ("puts no blank before text that begins with one" in capsys.readouterr().err) is prefix


def test_a_merge_that_is_missing_is_refused_since_llama_cpp_would_do_it(paddle: Path, tmp_path: Path) -> None:
    make("byte fallback, first", paddle, tmp_path)
    file = tmp_path / "tokenizer.json"
    state = json.loads(file.read_text())
    state["model"]["merges"].remove("s >")
    file.write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="no merge for 's>'"):
        vocabulary_fields(load_tokenizer(tmp_path), 400)


def test_a_unigram_model_is_refused(tiny: dict[str, Path], tmp_path: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quiet river and the word"] * 40), model_prefix=str(tmp_path / "tokenizer"),
        model_type="unigram", vocab_size=300, byte_fallback=True, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    with pytest.raises(CheckpointError, match="unigram"):
        vocabulary_fields(load_tokenizer(tmp_path), 300)
