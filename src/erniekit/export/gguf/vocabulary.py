"""A tokenizer as GGUF keys: pieces, scores or merges, what each piece is, and the ids with a role. Called by run.py.

llama.cpp encodes by itself, in one of two ways: `llama` merges neighbours by the score of what they become, as
SentencePiece does; `gpt2` is byte-level BPE with a pre-tokeniser it has by name. A tokenizer that neither of them
reproduces is refused, since its model would read other ids than it was trained on.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from erniekit.data.token_width import BYTES, message_fields, parts
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.vocabulary import SentencePieceVocabulary
from erniekit.errors import CheckpointError
from erniekit.log import warn

# Kinds of pieces, numbered alike in GGUF and in SentencePiece's model files.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_BPE = 2  # TrainerSpec.model_type
_SPACE = "▁"
# Pre-tokenisers by their pattern, and whether a word that is itself a piece skips the merges (ignore_merges).
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PRE = {
    (rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}", True): "llama-bpe",
    (rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}", False): "smaug-bpe",
    (rf"{_ENDINGS}|{_LETTERS}|\p{{N}}|{_REST}", False): "qwen2",
    (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", False): "gpt-2",
    ("", False): "gpt-2",  # the pattern ByteLevel has of its own
}


def vocabulary_fields(tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    """rows: of the embedding. llama.cpp requires a piece for each; ids beyond them can never be used and are left
    out."""
    if isinstance(tokenizer.vocabulary, SentencePieceVocabulary):
        out = _sentencepiece(tokenizer, tokenizer.vocabulary.added_token)
    else:
        out = _json(tokenizer)
    count = len(out["tokens"])
    out["tokens"] += [f"[PAD{id}]" for id in range(count, rows)]
    out["token_type"] += [UNUSED] * (rows - count)
    if "scores" in out:
        out["scores"] += [-10000.0] * (rows - count)
    for key in ("tokens", "token_type", "scores"):
        if key in out:
            out[key] = out[key][:rows]
    roles = {role: tokenizer.special_ids[token] for role, token in tokenizer.named_tokens.items()}
    out |= {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "eot_token_id": tokenizer.end_id,  # a reply ends with it
        "unknown_token_id": roles.get("unk_token"),
        "separator_token_id": roles.get("sep_token"),
        "padding_token_id": tokenizer.pad_id,
        "cls_token_id": roles.get("cls_token"),
        "mask_token_id": roles.get("mask_token"),
        "add_eos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in out.items() if value is not None}


def _sentencepiece(tokenizer: Tokenizer, added: dict[int, str]) -> dict[str, Any]:
    """added: tokens on top of the model file, by id."""
    pieces, scores, kinds = [], [], []
    trainer: dict[int, Any] = {}
    normaliser: dict[int, Any] = {}
    for number, data in message_fields(tokenizer.files[0].read_bytes()):
        if number == 1:
            piece = dict(message_fields(data))
            pieces.append(piece[1].decode("utf-8"))
            scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
            kinds.append(piece.get(3, NORMAL))
        elif number in (2, 3):
            (trainer if number == 2 else normaliser).update(message_fields(data))
    if trainer.get(3, 1) != _BPE:
        raise _unknown(tokenizer, "SentencePiece in its unigram form; llama.cpp's `llama` is the BPE form")
    if normaliser.get(2) or normaliser.get(4, 1):
        _warn_of_normaliser(tokenizer)
    _require_bytes(tokenizer, set(pieces))
    for id in range(len(pieces), tokenizer.vocab_size):
        pieces.append(added.get(id, f"[PAD{id}]"))
        scores.append(-1000.0)
        kinds.append(USER_DEFINED if id in added else UNUSED)
    kinds = [CONTROL if tokenizer.is_special(id) and kind != UNKNOWN else kind for id, kind in enumerate(kinds)]
    return _llama(tokenizer, pieces, scores, kinds)


def _json(tokenizer: Tokenizer) -> dict[str, Any]:
    file = tokenizer.files[0]
    state = json.loads(file.read_text(encoding="utf-8"))
    model = state.get("model") or {}
    if model.get("type", "BPE") != "BPE" or not model.get("vocab"):
        raise _unknown(tokenizer, f"a model of type {model.get('type')}; llama.cpp's are BPE")
    vocab: dict[str, int] = model["vocab"]
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    added = {entry["id"]: entry["content"] for entry in state.get("added_tokens") or []}
    pieces = [f"[PAD{id}]" for id in range(tokenizer.vocab_size)]
    kinds = [UNUSED] * len(pieces)
    for token, id in vocab.items():
        pieces[id], kinds[id] = token, NORMAL
    for id, token in added.items():
        pieces[id], kinds[id] = token, USER_DEFINED
    for id in tokenizer.special_ids.values():
        kinds[id] = CONTROL
    steps = {part.get("type"): part for part in parts(state.get("pre_tokenizer"))}
    if "ByteLevel" in steps:
        return _byte_level(tokenizer, state, steps, pieces, kinds, merges)
    if set(steps) - {"Metaspace"} or steps.get("Metaspace", {"split": False}).get("split", True):
        raise _unknown(tokenizer, f"pre-tokenisers llama.cpp does not have: {', '.join(map(str, steps))}")
    _check_normaliser(tokenizer, state, ("Prepend", "Replace"))
    if "Metaspace" in steps and tokenizer.vocabulary.prefix == "always":
        warn(f"{file.name} puts no blank before text that begins with one, llama.cpp does: its ids differ there")
    _require_bytes(tokenizer, set(vocab) if model.get("byte_fallback") else set())
    for byte in BYTES:
        kinds[vocab[byte]] = BYTE
    if (unk := tokenizer.special_ids.get(model.get("unk_token") or "")) is not None:
        kinds[unk] = UNKNOWN
    return _llama(tokenizer, pieces, _scores(tokenizer, vocab, merges, len(pieces)), kinds)


def _scores(tokenizer: Tokenizer, vocab: dict[str, int], merges: list[Any], count: int) -> list[float]:
    """llama.cpp merges whatever two neighbours become a piece, the best score first. That is what ranked pairs do where
    every such pair is among them, and those of one piece follow each other."""
    out = [-1e6] * count
    merge_set = set(merges)
    order = [left + right for left, right in merges]
    starts = [piece for at, piece in enumerate(order) if at == 0 or order[at - 1] != piece]
    special = set(tokenizer.special_ids)
    for piece in vocab:
        pairs = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        if piece in BYTES or piece in special:
            continue
        if any(pair not in merge_set for pair in pairs if pair[0] in vocab and pair[1] in vocab):
            raise _unknown(tokenizer, f"no merge for {piece!r}, whose parts are pieces; llama.cpp would merge them")
    if len(starts) != len(set(starts)):
        raise _unknown(tokenizer, "merges of one piece apart from each other; llama.cpp has one score for a piece")
    for rank, piece in enumerate(starts):
        out[vocab[piece]] = -float(rank)
    return out


def _byte_level(
    tokenizer: Tokenizer, state: dict[str, Any], steps: dict[Any, Any], pieces: list[str], kinds: list[int],
    merges: list[Any],
) -> dict[str, Any]:  # fmt: skip
    split = steps.get("Split") or {}
    pattern = (split.get("pattern") or {}).get("Regex", "")
    key = (pattern, bool(state["model"].get("ignore_merges")))
    ordinary = not set(steps) - {"Split", "ByteLevel"} and not steps["ByteLevel"].get("add_prefix_space")
    own = steps["ByteLevel"].get("use_regex", True)
    if not ordinary or key not in _PRE or own == bool(split) or split.get("behavior", "Isolated") != "Isolated":
        raise _unknown(tokenizer, "a pre-tokeniser llama.cpp has no name for")
    _check_normaliser(tokenizer, state, ())
    return {
        "model": "gpt2",
        "pre": _PRE[key],
        "tokens": pieces,
        "token_type": kinds,
        "merges": [f"{left} {right}" for left, right in merges],
    }


def _llama(tokenizer: Tokenizer, pieces: list[str], scores: list[float], kinds: list[int]) -> dict[str, Any]:
    # A user-defined piece is looked for in the text as it stands, before blanks become ▁.
    tokens = [p.replace(_SPACE, " ") if kind == USER_DEFINED else p for p, kind in zip(pieces, kinds)]
    return {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": scores,
        "token_type": kinds,
        # llama.cpp puts the blank before every stretch of text or before none. "first" is none: a document opens
        # with a control token.
        "add_space_prefix": tokenizer.vocabulary.prefix == "always",
    }


def _require_bytes(tokenizer: Tokenizer, pieces: set[str]) -> None:
    if not pieces.issuperset(BYTES):
        raise _unknown(tokenizer, "no pieces for single bytes; llama.cpp stops at a character it has no piece for")


def _check_normaliser(tokenizer: Tokenizer, state: dict[str, Any], allowed: tuple[str, ...]) -> None:
    if any(part.get("type") not in allowed for part in parts(state.get("normalizer"))):
        _warn_of_normaliser(tokenizer)


def _warn_of_normaliser(tokenizer: Tokenizer) -> None:
    warn(f"{tokenizer.files[0].name} normalises text, llama.cpp does not: text that this changes gets other ids there")


def _unknown(tokenizer: Tokenizer, what: str) -> CheckpointError:
    return CheckpointError(
        f"llama.cpp cannot encode with this tokenizer: {what}",
        where=str(tokenizer.files[0]),
        fix="export it with format=safetensors, for transformers, vLLM and `erniekit server`",
    )
