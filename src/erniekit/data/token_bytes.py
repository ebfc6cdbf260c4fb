"""The bytes that each token adds to a text. Called by tokenizer.py, for log-probabilities and for grammars, which are
over bytes.

SentencePiece models, and a tokenizer.json whose decoder is byte-level, or `▁` for a blank with or without pieces for
single bytes. A decoder that does more (WordPiece's `##`) has no such table: there a token's text depends on others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from erniekit.data.token_width import BYTES
from erniekit.data.vocabulary import JsonVocabulary, SentencePieceVocabulary, Vocabulary

BYTE_OF = {piece: bytes([byte]) for byte, piece in enumerate(BYTES)}
PLAIN_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def spelling(vocabulary: Vocabulary) -> Callable[[int], bytes] | None:
    """A token's bytes by its id, as they stand inside a text, whatever control tokens there are. None: this vocabulary
    has no such table."""
    if isinstance(vocabulary, SentencePieceVocabulary):
        return _sentencepiece(vocabulary)
    return _tokenizer_json(vocabulary) if isinstance(vocabulary, JsonVocabulary) else None


def _sentencepiece(vocabulary: SentencePieceVocabulary) -> Callable[[int], bytes]:
    def bytes_of(id: int) -> bytes:
        if id in vocabulary.added_token:
            return vocabulary.added_token[id].encode()
        piece = vocabulary.piece_text(id)
        return b"" if piece is None else BYTE_OF.get(piece) or piece.replace("▁", " ").encode()

    return bytes_of


def _tokenizer_json(vocabulary: JsonVocabulary) -> Callable[[int], bytes] | None:
    state = vocabulary.state()
    added = {entry["id"]: str(entry["content"]) for entry in state.get("added_tokens") or []}
    decoders = _decoders(state.get("decoder"))
    kinds = {str(part.get("type")) for part in decoders}
    if kinds == {"ByteLevel"}:
        letters = byte_letters()

        def piece_bytes(piece: str) -> bytes:
            return bytes(letters[letter] for letter in piece if letter in letters)

    elif kinds and kinds <= PLAIN_DECODERS:
        blank = "▁" if "Metaspace" in kinds or _replaces_blank(decoders) else None
        single = BYTE_OF if "ByteFallback" in kinds else {}

        def piece_bytes(piece: str) -> bytes:
            return single.get(piece) or (piece.replace(blank, " ") if blank else piece).encode()

    else:
        return None

    def bytes_of(id: int) -> bytes:
        return added[id].encode() if id in added else piece_bytes(vocabulary.token_of(id))

    return bytes_of


def _decoders(node: Any) -> list[dict[str, Any]]:
    if not isinstance(node, dict):
        return []
    if node.get("type") == "Sequence":
        return [part for child in node.get("decoders") or [] for part in _decoders(child)]
    return [node]


def _replaces_blank(decoders: list[dict[str, Any]]) -> bool:
    return any((part.get("pattern") or {}).get("String") == "▁" and part.get("content") == " " for part in decoders)


def byte_letters() -> dict[str, int]:
    """GPT-2's letters of the 256 bytes: printable Latin-1 stands for itself, the others for letters from 256 on."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + n): byte for n, byte in enumerate(others)}
