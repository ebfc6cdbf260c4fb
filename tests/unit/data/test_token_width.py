"""No token stands for more characters than the width says; where nothing can be said, there is no width."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import pytest

from erniekit.data.token_width import json_width
from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from support.small_tokenizers import KINDS, byte_level, make


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, paddle: Path, tmp_path: Path) -> Tokenizer:
    return make(request.param, paddle, tmp_path / "t")


def test_a_text_never_has_fewer_tokens_than_its_characters_allow(tokenizer: Tokenizer) -> None:
    luck = random.Random(7)
    words = [token for token in tokenizer.vocabulary.tokens()]
    longest = sorted(words, key=len)[-20:]
    assert tokenizer.widest is not None
    assert tokenizer.widest >= len(longest[-1])
    odd = [
        " " * 50,
        "\n" * 20,
        "\u200b" * 30,
        "e\u0301\u0302" * 9,
        "👩‍👩‍👧‍👦",
        "\x00",
        "\ufeff",
        "ﬁ",
        "１２",
        "a" * 300,
    ]
    for _ in range(300):
        text = "".join(luck.choices([*longest, *odd, *words[-50:]], k=luck.randrange(1, 12)))
        assert len(tokenizer.encode_text(text)) >= tokenizer.least_tokens(len(text)), text


def test_where_characters_can_get_lost_there_is_no_width(tmp_path: Path) -> None:
    byte_level(tmp_path)
    good = json.loads((tmp_path / "tokenizer.json").read_text())
    assert json_width(good) is not None

    def changed(**parts: object) -> int | None:
        return json_width({**copy.deepcopy(good), **parts})

    assert changed(normalizer={"type": "NFKC"}) is None
    assert changed(normalizer={"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}) is None
    assert changed(normalizer={"type": "Replace", "pattern": {"String": "ab"}, "content": "a"}) is None
    assert changed(pre_tokenizer={"type": "WhitespaceSplit"}) is None
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    both = {"type": "Sequence", "pretokenizers": [split, good["pre_tokenizer"]]}
    assert changed(pre_tokenizer=both) is None
    assert changed(pre_tokenizer=None) is None, "no letters for bytes and no byte pieces: unknown characters are lost"
    assert changed(added_tokens=[{**good["added_tokens"][0], "rstrip": True}]) is None
    assert changed(model={"type": "WordPiece", "vocab": {}}) is None


def test_a_sentencepiece_model_that_normalises_has_no_width(paddle: Path, tmp_path: Path) -> None:
    import sentencepiece

    for rule, width in (("nmt_nfkc", False), ("identity", True)):
        folder = tmp_path / rule
        folder.mkdir()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the quiet river and the word"] * 20), model_prefix=str(folder / "tokenizer"),
            vocab_size=300, byte_fallback=True, model_type="bpe", normalization_rule_name=rule,
            remove_extra_whitespaces=False, hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
        (folder / "tokenizer_config.json").write_text("{}")
        assert (load_tokenizer(folder).widest is not None) is width
