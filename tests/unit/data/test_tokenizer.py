"""Ids against the recorded Paddle run and transformers' own classes; control tokens against text that spells them."""

from __future__ import annotations

import io
import json
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from erniekit.errors import CheckpointError

WORDS = ["the", "river", "copper", "Hello", "x1", "42", "河边的灯", "🙂", "naïve", "a\nb", "\t", "é́", "<", "|>"]


@pytest.fixture(scope="module")
def ernie(paddle: Path) -> Tokenizer:
    return load_tokenizer(paddle / "tokenizer")


@pytest.fixture(scope="module")
def ernie_copy(paddle: Path, tmp_path_factory: pytest.TempPathFactory):
    """A copy of the recorded folder with other settings in its tokenizer_config.json."""

    def make(**changes) -> Path:
        folder = tmp_path_factory.mktemp("tokenizer") / "t"
        shutil.copytree(paddle / "tokenizer", folder)
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
        return folder

    return make


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama-type SentencePiece folder: a space before the text, byte fallback, <s> and </s> as control pieces."""
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(400)),
        model_writer=out,
        vocab_size=360,
        model_type="bpe",
        byte_fallback=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    folder = tmp_path_factory.mktemp("llama")
    (folder / "tokenizer.model").write_bytes(out.getvalue())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": False}))
    return folder


def bpe_folder(folder: Path, metaspace: str | None) -> Path:
    """A tokenizer.json trained here: byte-level as in Llama 3, or with metaspaces as in Llama 2."""
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Engine

    engine = Engine(models.BPE(byte_fallback=metaspace is not None, unk_token="<unk>" if metaspace else None))
    special = ["<unk>", "<s>", "</s>", "<|eot_id|>"]
    if metaspace:
        if metaspace == "prepend":
            engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=metaspace, split=False)
        engine.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special + alphabet, show_progress=False)
    else:
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        engine.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    engine.train_from_iterator(sentences(400), trainer)
    engine.add_tokens([AddedToken("<think>", normalized=False)])
    engine.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|eot_id|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=["bytes", "first", "always", "prepend"])
def json_folder(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bpe_folder(tmp_path_factory.mktemp("bpe"), None if request.param == "bytes" else request.param)


def sentences(count: int) -> list[str]:
    rng = random.Random(5)
    return [" ".join(rng.choices(WORDS[:4], k=8)) for _ in range(count)]


def texts(count: int, seed: int = 7, control: tuple[str, ...] = ()) -> list[str]:
    rng = random.Random(seed)
    glue = ["", " ", "  ", "\n"]
    return [
        "".join(rng.choice([*WORDS, *control]) + rng.choice(glue) for _ in range(rng.randint(1, 9)))
        for _ in range(count)
    ]


def test_recorded_strings_give_the_recorded_ids(ernie: Tokenizer, paddle: Path) -> None:
    recorded = json.loads((paddle / "data_sft.json").read_text())
    assert ernie.vocab_size == recorded["vocab_size"]
    for token, id in recorded["special_ids"].items():
        assert ernie.special_ids.get(token, 10) == id  # the newline has id 10 and is text
    for case in recorded["encode"]:
        assert ernie.encode_rendered([(case["text"], True)]) == case["ids"]


def test_roles_of_the_ernie_tokens(ernie: Tokenizer) -> None:
    assert (ernie.pad_id, ernie.bos_id, ernie.eos_id, ernie.begin_id, ernie.end_id) == (0, 1, 2, 3, 4)


def test_ernie_ids_equal_transformers(ernie: Tokenizer, paddle: Path) -> None:
    from transformers import LlamaTokenizer

    theirs = LlamaTokenizer.from_pretrained(str(paddle / "tokenizer"))
    for text in texts(300):
        assert ernie.encode_text(text) == theirs.encode(text, add_special_tokens=False), text
    for text in texts(100, control=("<|end_of_sentence|>", "<|begin_of_sentence|>", "<mask:4>")):
        assert ernie.encode_rendered([(text, True)]) == theirs.encode(text, add_special_tokens=False), text


def test_llama_ids_equal_transformers(llama_folder: Path) -> None:
    from transformers import LlamaTokenizer

    theirs = LlamaTokenizer.from_pretrained(str(llama_folder))
    ours = load_tokenizer(llama_folder)
    for text in texts(200, control=("</s>", "<s>")):
        # SentencePiece puts its space before every text, transformers' Metaspace only before one without.
        if not text.startswith(" "):
            assert ours.encode_rendered([(text, True)]) == theirs.encode(text, add_special_tokens=False), text


def test_json_ids_equal_transformers(json_folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(str(json_folder))
    ours = load_tokenizer(json_folder)
    for text in texts(200, control=("</s>", "<|eot_id|>", "<think>")):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode_rendered([(text, True)]) == ids, text
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, clean_up_tokenization_spaces=False)


def test_a_llama_text_that_goes_on_gets_no_second_space(llama_folder: Path) -> None:
    ours = load_tokenizer(llama_folder)
    start = ours.encode_rendered([("the river", False)])
    assert ours.pieces(start)[0].startswith(" ")
    assert not ours.pieces(ours.encode_rendered([("the river", False)], before=start))[0].startswith(" ")
    assert not ours.pieces(ours.encode_rendered([("</s>the river", True)]))[1].startswith(" ")


@pytest.mark.parametrize("which", ["ernie", "llama", "json"])
def test_control_strings_in_text_stay_text_and_survive_a_round_trip(which, paddle, llama_folder, tmp_path) -> None:
    folder = {"ernie": paddle / "tokenizer", "llama": llama_folder}.get(which) or bpe_folder(tmp_path, None)
    ours = load_tokenizer(folder)
    control = set(ours.special_ids.values())
    for text in [*texts(300, seed=3, control=tuple(ours.special_ids) * 3), "\x00", "", " ", "<<s>s>", "<|<s>|>"]:
        ids = ours.encode_text(text)
        assert control.isdisjoint(ids), text
        assert ours.decode(ids) == text
        assert ours.encode_rendered([(text, False)]) == ids


def test_text_is_joined_across_spans_before_it_is_encoded(ernie: Tokenizer) -> None:
    spans = [
        ("<|begin_of_sentence|>User: ", True),
        ("the river <|end_of_sentence|>", False),
        ("<|end_of_sentence|>", True),
    ]
    ids = ernie.encode_rendered(spans)
    assert ids[0] == ernie.begin_id
    assert ids[-1] == ernie.end_id
    assert ids.count(ernie.end_id) == 1
    assert ids[1:5] == ernie.encode_text("User: the river")
    assert ernie.decode(ids, skip_special=False) == "".join(span for span, _ in spans)
    assert ernie.decode(ids) == "User: the river <|end_of_sentence|>"


def test_tokens_added_on_top_of_sentencepiece(ernie_copy) -> None:
    folder = ernie_copy(additional_special_tokens=["<|crop|>", "<think>"])
    (folder / "added_tokens.json").write_text(json.dumps({"<|crop|>": 512, "<think>": 513, "<word>": 514}))
    ours = load_tokenizer(folder)
    assert ours.vocab_size == 515
    assert ours.encode_rendered([("<|crop|>", True)]) == [512]
    assert 512 not in ours.encode_text("a <|crop|>")
    # An assistant writes <think> itself, so it is vocabulary even where a folder lists it as special.
    assert ours.encode_text("<think>the<word>") == [513, *ours.encode_text("the"), 514]
    assert ours.decode([512, 513, 514]) == "<think><word>"


def test_unlisted_markers_of_the_vocabulary_are_control_tokens(ernie_copy) -> None:
    folder = ernie_copy(additional_special_tokens=[])
    (folder / "special_tokens_map.json").unlink()
    ours = load_tokenizer(folder)
    assert ours.special_ids["<mask:5>"] == 7
    assert 7 not in ours.encode_text("<mask:5>")


def test_ids_beyond_the_vocabulary_do_not_break_decoding(ernie: Tokenizer) -> None:
    assert ernie.decode([268, 600]) == "the"
    assert ernie.pieces([268, 600]) == ["the", "<id 600>"]


def test_sentencepiece_is_preferred_for_ernie_and_tokenizer_json_elsewhere(paddle, tmp_path, llama_folder) -> None:
    bpe_folder(tmp_path, None)
    shutil.copy(llama_folder / "tokenizer.model", tmp_path)
    assert load_tokenizer(tmp_path).files[0].name == "tokenizer.json"
    (tmp_path / "config.json").write_text('{"model_type": "ernie4_5"}')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load_tokenizer(tmp_path).files[0].name == "tokenizer.model"


def test_template_comes_from_the_jinja_file_first_and_lists_by_name(ernie_copy) -> None:
    folder = ernie_copy(chat_template=[{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}])
    assert (load_tokenizer(folder).chat_template, load_tokenizer(folder).tool_template) == ("D", "T")
    (folder / "chat_template.jinja").write_text("J")
    assert load_tokenizer(folder).chat_template == "J"


def test_fingerprint_follows_what_changes_ids_and_nothing_else(ernie: Tokenizer, ernie_copy) -> None:
    assert load_tokenizer(ernie_copy()).fingerprint == ernie.fingerprint
    assert load_tokenizer(ernie_copy(model_max_length=7)).fingerprint == ernie.fingerprint
    assert load_tokenizer(ernie_copy(chat_template="x")).fingerprint != ernie.fingerprint
    assert load_tokenizer(ernie_copy(eos_token="<s>")).fingerprint != ernie.fingerprint


def test_a_pickled_tokenizer_loads_itself_again(ernie: Tokenizer) -> None:
    again = pickle.loads(pickle.dumps(ernie))
    assert again.fingerprint == ernie.fingerprint
    assert again.encode_text("the quiet river") == [268, 418, 340]


def test_broken_folders_are_named_with_a_way_out(ernie_copy, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    folder = ernie_copy()
    (folder / "tokenizer.model").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="SentencePiece"):
        load_tokenizer(folder)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="end-of-text"):
        load_tokenizer(ernie_copy(eos_token="<nowhere>"))
    folder = ernie_copy()
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="JSON"):
        load_tokenizer(folder)


def test_the_text_path_imports_neither_transformers_nor_torch(paddle: Path) -> None:
    code = (
        "import sys; from erniekit.data.tokenizer import load_tokenizer; "
        "import erniekit.data.assemble, erniekit.data.formats, erniekit.data.inspect; "
        f"load_tokenizer({str(paddle / 'tokenizer')!r}).encode_text('a'); "
        "sys.exit(bool({'transformers', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_a_tokenizer_of_gigabytes_is_refused_by_its_size(tmp_path, name):
    with open(tmp_path / name, "wb") as file:
        file.truncate(8 << 30)  # sparse: no bytes on the disk
    with pytest.raises(CheckpointError, match="limit"):
        load_tokenizer(tmp_path)
