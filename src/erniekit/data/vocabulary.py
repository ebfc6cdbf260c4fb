"""The two engines behind a tokenizer folder: SentencePiece `tokenizer.model`, and `tokenizer.json`.

Called by tokenizer.py only. Both encode plain text; which strings are control tokens is decided by the caller.
Texts are encoded many at a time: a call of the library for each of ten thousand short ones costs more than they do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from erniekit.data.token_width import json_width, parts, sentencepiece_width
from erniekit.errors import CheckpointError

# Where an engine puts a space before text: nowhere, at the start of a document, or also after each control token.
Prefix = Literal["never", "first", "always"]
Run = tuple[str, bool]  # a text, and whether a space is put before it

# Protobuf, appended to a serialized model, where the later value of a field counts: normalizer_spec (3) with
# add_dummy_prefix (3) false. `override_normalizer_spec` did the same until sentencepiece 0.2.3 removed it.
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class Vocabulary(Protocol):
    prefix: Prefix
    size: int

    def id_of(self, token: str) -> int | None: ...
    def token_of(self, id: int) -> str: ...
    def tokens(self) -> Iterable[str]: ...
    def encode_many(self, runs: Sequence[Run]) -> list[list[int]]: ...
    def widest(self) -> int | None: ...
    def decode(self, ids: Sequence[int], control: dict[int, str]) -> str: ...
    def show(self, id: int) -> str: ...


class SentencePieceVocabulary:
    """Pieces of the model file, plus tokens that were added on top of it by id (added_tokens.json)."""

    def __init__(self, path: Path, added: dict[str, int], add_prefix_space: bool | None, legacy: bool) -> None:
        import sentencepiece

        try:
            model = path.read_bytes()
            self._sp = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                "the tokenizer file is not a SentencePiece model",
                where=str(path),
                fix="download it again; a Git LFS pointer or a partial download looks like this",
            ) from error
        pieces = self._sp.get_piece_size()
        self._added = {token: id for token, id in added.items() if id >= pieces}
        self.added_token = {id: token for token, id in self._added.items()}
        self._added_pattern = any_of(self._added)
        self._pieces = pieces
        self.size = max([pieces, *(id + 1 for id in self._added.values())])
        self.prefix: Prefix = "never"
        keeps_spaces = self._sp.encode("a  b") != self._sp.encode("a b")
        has_prefix = self._sp.encode("a", out_type=str)[0].startswith("▁")
        if has_prefix and keeps_spaces:
            # We add the space ourselves: text that goes on inside a document must not get one.
            self._sp = sentencepiece.SentencePieceProcessor(model_proto=model + NO_DUMMY_PREFIX)
            if add_prefix_space is not False:
                self.prefix = "always" if legacy else "first"

    def id_of(self, token: str) -> int | None:
        if token in self._added:
            return self._added[token]
        id = self._sp.piece_to_id(token)
        return id if self._sp.id_to_piece(id) == token else None

    def token_of(self, id: int) -> str:
        return self.added_token.get(id) or self._sp.id_to_piece(id)

    def tokens(self) -> Iterable[str]:
        return [*self._sp.id_to_piece(list(range(self._pieces))), *self._added]

    def piece_text(self, id: int) -> str | None:
        """A piece of the model file; None for one that is no text."""
        known = id < self._pieces and not (self._sp.is_control(id) or self._sp.is_unknown(id) or self._sp.is_unused(id))
        return self._sp.id_to_piece(id) if known else None

    def forget(self, tokens: Iterable[str]) -> None:
        """Added tokens that are control tokens: never matched in plain text."""
        self._added_pattern = any_of(set(self._added) - set(tokens))

    def encode_many(self, runs: Sequence[Run]) -> list[list[int]]:
        if self._added_pattern is None:
            return self._encode(runs)
        return _encode_around(self._added_pattern, self._added, runs, self.prefix == "always", self._encode)

    def _encode(self, runs: Sequence[Run]) -> list[list[int]]:
        texts = [" " + text if prefix and text else text for text, prefix in runs]
        return [self._sp.encode(texts[0])] if len(texts) == 1 else self._sp.encode(texts, num_threads=1)

    def widest(self) -> int | None:
        """The most characters of a text that one id stands for; None where that has no bound."""
        return sentencepiece_width(self._sp, self._added)

    def decode(self, ids: Sequence[int], control: dict[int, str]) -> str:
        out: list[str] = []
        run: list[int] = []

        def flush() -> None:
            text = self._sp.decode(run) if run else ""
            begins = self.prefix == "always" or (self.prefix == "first" and not out)
            out.append(text[1:] if begins and text.startswith(" ") else text)
            run.clear()

        for id in ids:
            whole = control.get(id) or self.added_token.get(id)
            if whole is None and id < self._pieces:
                run.append(id)
            elif whole is not None:
                flush()
                out.append(whole)
        flush()
        return "".join(out)

    def show(self, id: int) -> str:
        return self.token_of(id).replace("▁", " ")


class JsonVocabulary:
    """A `tokenizer.json`, with its own idea of specials and prefix spaces replaced by the caller's."""

    def __init__(self, path: Path) -> None:
        try:
            self._state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            self.prefix: Prefix = _take_prefix(self._state)
            self._no_double = _has(self._state.get("pre_tokenizer"), "Metaspace", "ByteLevel")
            self._load()
        except Exception as error:  # the tokenizers library raises bare Exception
            raise CheckpointError(
                "tokenizer.json cannot be read", where=str(path), fix=f"download it again ({error})"
            ) from error

    def _load(self) -> None:
        from tokenizers import Tokenizer

        self._tok = Tokenizer.from_str(json.dumps(self._state))
        self._tok.encode_special_tokens = True  # special strings in text stay text
        self._tok.no_padding()
        self._tok.no_truncation()
        ids = self._tok.get_vocab(with_added_tokens=True).values()
        self.size = max(ids, default=-1) + 1

    def declared(self) -> dict[str, bool]:
        """Added tokens and whether the file calls them special."""
        return {entry["content"]: bool(entry.get("special")) for entry in self._state.get("added_tokens") or []}

    def set_control(self, control: set[str]) -> None:
        """Exactly these are never matched in text, whatever the file has."""
        changed = False
        for entry in self._state.get("added_tokens") or []:
            special = entry["content"] in control
            changed |= bool(entry.get("special")) != special
            entry["special"] = special
        if changed:
            self._load()
        added = self._state.get("added_tokens") or []
        self._added: dict[str, int] = {entry["content"]: entry["id"] for entry in added if not entry["special"]}
        self._added_pattern = any_of(self._added)
        self._state = {}

    def id_of(self, token: str) -> int | None:
        return self._tok.token_to_id(token)

    def token_of(self, id: int) -> str:
        return self._tok.id_to_token(id) or ""

    def tokens(self) -> Iterable[str]:
        return self._tok.get_vocab(with_added_tokens=True)

    def encode_many(self, runs: Sequence[Run]) -> list[list[int]]:
        if self._added_pattern is None or self.prefix == "never":  # the engine finds added tokens by itself
            return self._encode(runs)
        return _encode_around(self._added_pattern, self._added, runs, self.prefix == "always", self._encode)

    def _encode(self, runs: Sequence[Run]) -> list[list[int]]:
        texts = [
            " " + text if prefix and text and not (self._no_double and text[0] in " ▁") else text
            for text, prefix in runs
        ]
        # Not its batches: they start threads, which a process that forks later cannot have.
        return [self._tok.encode(text, add_special_tokens=False).ids for text in texts]

    def widest(self) -> int | None:
        """The most characters of a text that one id stands for; None where that has no bound."""
        return json_width(self.state())

    def state(self) -> dict[str, Any]:
        """The tokenizer.json as it is used here."""
        state: dict[str, Any] = json.loads(self._tok.to_str())
        return state

    def decode(self, ids: Sequence[int], control: dict[int, str]) -> str:
        return self._tok.decode([id for id in ids if id < self.size], skip_special_tokens=False)

    def show(self, id: int) -> str:
        token = self.token_of(id)
        text = self._tok.decode([id], skip_special_tokens=False)
        # Decoders strip the first space of a text; the piece by itself still has it.
        return " " + text if token.startswith("▁") and not text.startswith(" ") else text


def _encode_around(
    texts: re.Pattern[str],
    ids: dict[str, int],
    runs: Sequence[Run],
    prefix_after_added: bool,
    encode: Callable[[Sequence[Run]], list[list[int]]],
) -> list[list[int]]:
    """Added tokens become their ids; the text between them is encoded piece by piece, all pieces in one call."""
    pieces: list[Run] = []
    plans: list[list[int]] = []  # for each run: the ids of the added tokens between its pieces
    for text, prefix in runs:
        at = 0
        found = []
        for found_text in texts.finditer(text):
            pieces.append((text[at : found_text.start()], prefix_after_added if at else prefix))
            found.append(ids[found_text.group()])
            at = found_text.end()
        pieces.append((text[at:], prefix_after_added if at else prefix))
        plans.append(found)
    encoded = iter(encode_unique(pieces, encode))
    out = []
    for found in plans:
        run = list(next(encoded))
        for id in found:
            run.append(id)
            run += next(encoded)
        out.append(run)
    return out


def encode_unique(runs: Sequence[Run], encode: Callable[[Sequence[Run]], list[list[int]]]) -> list[list[int]]:
    """Each different run is encoded once: a text cut at every control string repeats a few pieces many times."""
    different = list(dict.fromkeys(runs))
    known = dict(zip(different, encode(different))) if different else {}
    return [known[run] for run in runs]


def behind_first_letters(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches the empty place behind the first letter of each of the texts, also of one that begins inside another. All
    have two letters or more."""
    rests: dict[str, list[str]] = {}
    for found_text in texts:
        rests.setdefault(found_text[0], []).append(found_text[1:])
    found = ((letter, any_of(rest)) for letter, rest in rests.items())
    return re.compile("|".join(f"(?<={re.escape(letter)})(?={rest.pattern})" for letter, rest in found if rest))


def any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Matches any of the texts, the longest first; None for no texts.

    Built as a tree: ERNIE has over a thousand markers, and trying each at every `<` of a web page takes seconds.
    """
    tree: dict[str, Any] = {}
    for found_text in texts:
        node = tree
        for letter in found_text:
            node = node.setdefault(letter, {})
        node[""] = {}  # a text ends here

    def pattern(node: dict[str, Any]) -> str:
        branches = [re.escape(letter) + pattern(child) for letter, child in node.items() if letter]
        if not branches:
            return ""
        if "" in node:
            return f"(?:{'|'.join(branches)})?"
        return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"

    return re.compile(pattern(tree)) if tree else None


def _has(node: Any, *types: str) -> bool:
    return any(part.get("type") in types for part in parts(node))


def _take_prefix(state: dict[str, Any]) -> Prefix:
    """Removes the rules that put a space before text, and returns what they were."""
    prefix: Prefix = "never"
    for part in parts(state.get("normalizer")):
        if part.get("type") == "Prepend" and part.get("prepend") == "▁":
            part["prepend"], prefix = "", "always"
    for part in parts(state.get("pre_tokenizer")):
        if part.get("type") == "Metaspace":
            if part.get("prepend_scheme", "always") != "never":
                prefix = part.get("prepend_scheme", "always")
            part["prepend_scheme"] = "never"
        elif part.get("type") == "ByteLevel" and part.get("add_prefix_space"):
            part["add_prefix_space"], prefix = False, "always"
    return prefix
