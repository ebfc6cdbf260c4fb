"""Small tokenizer folders of each kind: SentencePiece, byte level, byte fallback, with and without prefix spaces."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from erniekit.data.tokenizer import Tokenizer, load_tokenizer

KINDS = ["ernie", "added words", "byte level", "byte fallback, always", "byte fallback, first"]


def byte_level(folder: Path) -> None:
    from tokenizers import Tokenizer as Engine
    from tokenizers import models, pre_tokenizers, trainers

    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    engine.train_from_iterator(["the quiet river 山 and the </s> word " * 3], trainer)
    engine.save(str(folder / "tokenizer.json"))


def byte_fallback(folder: Path, scheme: str) -> None:
    """Llama's form. `</s>` is also what merges give, so text that spells it must be cut."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehiqrtuvw</s>", "</", "s>"]
    vocab = {piece: n for n, piece in enumerate(dict.fromkeys(pieces))}
    model = {"type": "BPE", "vocab": vocab, "merges": ["< /", "s >", "</ s>"], "unk_token": "<unk>",
             "byte_fallback": True, "fuse_unk": True}  # fmt: skip
    added = [{"id": n, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": True} for n, text in enumerate(("<unk>", "<s>"))]  # fmt: skip
    state = {"version": "1.0", "added_tokens": added, "normalizer": None, "model": model, "decoder": None,
             "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
             "post_processor": None, "truncation": None, "padding": None}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(state))


def make(kind: str, paddle: Path, folder: Path) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    if kind in ("ernie", "added words"):
        shutil.copytree(paddle / "tokenizer", folder, dirs_exist_ok=True)
        if kind == "added words":
            size = load_tokenizer(paddle / "tokenizer").vocab_size
            (folder / "added_tokens.json").write_text(json.dumps({"<tool>": size, "<|x|>": size + 1}))
    else:
        byte_level(folder) if kind == "byte level" else byte_fallback(folder, kind.rpartition(" ")[2])
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return load_tokenizer(folder)
