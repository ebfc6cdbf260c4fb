"""The sample that a run shows before its first step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from erniekit.data.collate import one_document
from erniekit.data.tokenizer import load_tokenizer
from erniekit.data.types import IGNORE
from erniekit.recipes.doctor import longest_document, sample_lines


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


def test_the_gradients_are_probed_with_the_longest_document_that_has_labels() -> None:
    row = one_document(torch.arange(1, 14)[None], 13)
    row.labels[0, [0, 3, 4]] = 7  # the row begins with one token of a document; the last document has no label
    probed = longest_document(replace(row, cu_seqlens=torch.tensor([0, 1, 5, 13], dtype=torch.int32)), 512)
    assert probed.input_ids.tolist() == [[2, 3, 4, 5]]
    assert probed.labels.tolist() == [[IGNORE, IGNORE, 7, 7]]
