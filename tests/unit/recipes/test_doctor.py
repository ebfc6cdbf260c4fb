"""The sample that a run shows before its first step."""

from __future__ import annotations

from pathlib import Path

import torch

from erniekit.data.collate import one_document
from erniekit.data.tokenizer import load_tokenizer
from erniekit.recipes.doctor import sample_lines


def test_letters_that_are_several_byte_tokens_are_shown_as_letters(paddle: Path) -> None:
    tokenizer = load_tokenizer(paddle / "tokenizer")
    text = "\N{SNOWMAN} and \N{YI SYLLABLE IT}"
    ids = tokenizer.encode_text(text)
    assert any(piece.startswith("<0x") for piece in tokenizer.pieces(ids)), "this vocabulary lacks the letters"
    batch = one_document(torch.tensor([ids]), len(ids))
    batch.labels[0, -3:] = batch.input_ids[0, -3:]
    shown = sample_lines(batch, tokenizer)
    assert "\N{SNOWMAN}" in shown
    assert "<0x" not in shown
