"""How many characters of a text one token can stand for at most. Called by vocabulary.py, for the server's bounds.

A text of n characters has at least n / width tokens, so a prompt that cannot fit is known without encoding it. That
holds only where no character is lost on the way to the ids: no normaliser that deletes, collapses or joins, no single
unknown id for a whole stretch. Everywhere else there is no width, and the answer is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def sentencepiece_width(processor: Any, added: Iterable[str]) -> int | None:
    """With an identity normaliser and a piece for every byte; `added` are tokens on top of the model file."""
    if any(processor.id_to_piece(processor.piece_to_id(byte)) != byte for byte in BYTES):
        return None  # unknown characters in a row are one id
    spec = next((data for number, data in message_fields(processor.serialized_model_proto()) if number == 3), b"")
    # NormalizerSpec: 2 is the table of replacements; 4 (remove_extra_whitespaces) is true unless the file sets it.
    found = dict(message_fields(spec))
    if found.get(2, b"") or found.get(4, 1):
        return None
    pieces = processor.id_to_piece(list(range(processor.get_piece_size())))
    return max(map(len, (*pieces, *added)))


def message_fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a protobuf message: the bytes of nested ones and strings, numbers as they are."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            size, at = _varint(message, at)
        else:
            size = 8 if kind == 1 else 4
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    out = shift = 0
    while True:
        byte = message[at]
        out |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return out, at


def json_width(state: dict[str, Any]) -> int | None:
    """`state` is a tokenizer.json. Byte-level BPE, or BPE with a piece for every byte."""
    model = state.get("model") or {}
    vocab = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocab, dict):
        return None
    added = state.get("added_tokens") or []
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None  # such a token takes any number of blanks with it
    if not all(map(_keeps_text, parts(state.get("normalizer")))):
        return None
    cutting = parts(state.get("pre_tokenizer"))
    if not all(map(_keeps_characters, cutting)):
        return None
    if any(part.get("type") == "ByteLevel" for part in cutting):
        # Its 256 letters are one character each, and every id is a string of them: a byte is at most a character.
        if sum(len(token) == 1 for token in vocab) < 256:
            return None
    elif not model.get("byte_fallback") or not all(byte in vocab for byte in BYTES):
        return None
    return max(map(len, (*vocab, *(str(token.get("content", "")) for token in added))))


def _keeps_text(part: dict[str, Any]) -> bool:
    if part.get("type") == "Prepend":
        return True
    pattern = (part.get("pattern") or {}).get("String")
    return part.get("type") == "Replace" and isinstance(pattern, str) and len(str(part.get("content"))) >= len(pattern)


def _keeps_characters(part: dict[str, Any]) -> bool:
    kind = part.get("type")
    return kind in ("ByteLevel", "Metaspace", "Digits") or (kind == "Split" and part.get("behavior") != "Removed")


def parts(node: Any) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as a flat list, sequences opened."""
    if not isinstance(node, dict):
        return []
    if node.get("type") == "Sequence":
        inner = node.get("normalizers") or node.get("pretokenizers") or []
        return [part for child in inner for part in parts(child)]
    return [node]
