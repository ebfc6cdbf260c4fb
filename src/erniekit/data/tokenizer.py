"""Load a model folder's tokenizer: text to ids and back, control tokens kept apart from text that looks like them.

Called by template.py, the token cache and its workers, doctor, chat and export. Never imports transformers.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from erniekit.data.settings_files import read_added, read_settings, read_template
from erniekit.data.token_bytes import spelling
from erniekit.data.vocabulary import (
    JsonVocabulary,
    Run,
    SentencePieceVocabulary,
    Vocabulary,
    any_of,
    behind_first_letters,
    encode_unique,
)
from erniekit.errors import CheckpointError
from erniekit.files import refuse_special
from erniekit.files.listed import has_file, refuse_added_tokenizer
from erniekit.files.tokenizer_names import SENTENCEPIECE_NAMES, SETTINGS_NAMES

MAX_BYTES = 256 << 20  # of a tokenizer's main file; the largest known ones have some 35 MB
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "sep_token", "mask_token")
BEGIN, END = "<|begin_of_sentence|>", "<|end_of_sentence|>"
# Tags an assistant writes itself: vocabulary wherever they stand, even if a folder lists them as special.
GENERATED = frozenset({"<think>", "</think>", "<response>", "</response>", "<tool_call>", "</tool_call>"})
_MARKER = re.compile(r"<\|[^|\s]+\|>|<mask:\d+>")
# Part of every fingerprint: raise it when the same files would give other ids than before.
_RULES = 1
BATCH = 65_536  # characters that are encoded in one call


@dataclass
class _Settings:
    """The settings in the JSON files of a folder, in whichever of them they are."""

    roles: dict[str, str] = field(default_factory=dict)  # bos_token -> "<s>"
    extra: list[str] = field(default_factory=list)
    added: dict[str, int] = field(default_factory=dict)
    added_special: set[str] = field(default_factory=set)
    chat_template: str | None = None
    tool_template: str | None = None
    add_bos: bool | None = None
    add_prefix_space: bool | None = None
    legacy: bool = False
    ernie: bool = False
    files: list[Path] = field(default_factory=list)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a vocabulary of its own: only settings and templates are no tokenizer."""
    return any(has_file(folder, name) for name in (*SENTENCEPIECE_NAMES, "tokenizer.json"))


class Tokenizer:
    """`special_ids` are the control tokens. They come only from a template, never from text that spells them."""

    def __init__(
        self, folder: Path, vocabulary: Vocabulary, settings: _Settings, files: list[Path], rows: int | None = None
    ) -> None:
        """rows: of the embedding that ids are for, where it is known."""
        self.folder, self.files, self.vocabulary = folder, files, vocabulary
        self._rows = rows if rows is not None and rows < vocabulary.size else None  # where some ids have none
        self.chat_template, self.tool_template = settings.chat_template, settings.tool_template
        self.vocab_size = vocabulary.size
        self.special_ids = _control_tokens(vocabulary, settings)
        roles = {role: token for role, token in settings.roles.items() if token in self.special_ids}
        if "eos_token" not in roles:
            raise CheckpointError(
                "the tokenizer names no end-of-text token that is in its vocabulary",
                where=str(folder / "tokenizer_config.json"),
                fix='add "eos_token", e.g. "eos_token": "</s>"',
            )
        self.named_tokens = roles  # what a chat template sees: bos_token, eos_token, ...
        self.eos_id: int = self.special_ids[roles["eos_token"]]
        self.bos_id = self._id(roles.get("bos_token"))
        self.pad_id: int = self._first_id(roles.get("pad_token"), roles.get("unk_token"), roles["eos_token"])
        # Without ERNIE's sentence tokens a Llama-type folder opens with bos (if it adds one) and closes with eos.
        adds_bos = settings.add_bos if settings.add_bos is not None else not settings.ernie
        opens = roles.get("cls_token") or (roles.get("bos_token") if adds_bos else None)
        self.begin_token = BEGIN if BEGIN in self.special_ids else opens or ""
        self.end_token = END if END in self.special_ids else roles.get("sep_token") or roles["eos_token"]
        self.begin_id = self._id(self.begin_token)
        self.end_id: int = self.special_ids[self.end_token]
        pattern = any_of(self.special_ids)
        assert pattern is not None  # eos is in there
        self.special_pattern = pattern
        self._cuts = behind_first_letters(self.special_ids)
        self._token_of = {id: token for token, id in self.special_ids.items()}
        unk = self._id(roles.get("unk_token"))
        # unk is what an unknown character becomes: the one control id that text may give.
        self._forbidden = frozenset(self._token_of) - {unk}
        self.fingerprint = _fingerprint(vocabulary, settings, files[0], self.special_ids)
        if self._rows is not None:
            named = (self.eos_id, self.bos_id, self.pad_id, self.begin_id, self.end_id)
            self._check([id for id in named if id is not None])
            self.fingerprint += f"-{self._rows}"  # tokens kept for a larger model may not fit this one

    def __reduce__(self) -> tuple[Any, ...]:
        return load_tokenizer, (str(self.folder.absolute()), self._rows)

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def usable_ids(self) -> int:
        """How many ids, from 0 on, the model has a row for."""
        return self.vocab_size if self._rows is None else self._rows

    def is_special(self, id: int) -> bool:
        return id in self._token_of

    def _id(self, token: str | None) -> int | None:
        return self.special_ids.get(token) if token else None

    def _first_id(self, *tokens: str | None) -> int:
        return next(id for id in map(self._id, tokens) if id is not None)

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text by itself. Control strings inside it are written in ordinary pieces."""
        return self._check(self._encode_runs([(text, self.vocabulary.prefix != "never")])[0])

    @functools.cached_property
    def widest(self) -> int | None:
        """The most characters of a text that one token stands for; None where that has no bound."""
        return self.vocabulary.widest()

    @functools.cached_property
    def _spelling(self) -> Callable[[int], bytes] | None:
        return spelling(self.vocabulary)

    def bytes_of(self, id: int) -> bytes:
        """What a token adds to a text, a part of a character as well; of a control token its name. The first use may
        take a second for a large vocabulary."""
        if self._spelling is None or self.is_special(id) or id >= self.vocab_size:
            return self.decode([id], skip_special=False).encode("utf-8", "replace")
        return self._spelling(id)

    def token_bytes(self) -> list[bytes] | None:
        """Of all ids, as they stand inside a text; control tokens add nothing. None: this tokenizer has no such
        table."""
        bytes_of = self._spelling
        if bytes_of is None:
            return None
        return [b"" if self.is_special(id) else bytes_of(id) for id in range(self.vocab_size)]

    def least_tokens(self, characters: int) -> int:
        """The least number of tokens of a text of this many characters."""
        return -(-characters // self.widest) if self.widest else 0

    def _check(self, ids: list[int]) -> list[int]:
        """The same ids, where the embedding has a row for each."""
        if self._rows is not None and ids and (worst := max(ids)) >= self._rows:
            raise CheckpointError(
                f"token {self.pieces([worst])[0]!r} has id {worst:,}, the model's embedding {self._rows:,} rows",
                where=str(self.folder),
                fix="the tokenizer belongs to another model: check tokenizer_name, or the tokenizer files beside the "
                "weights",
            )
        return ids

    def encode_rendered(self, spans: Iterable[tuple[str, bool]], before: Sequence[int] = ()) -> list[int]:
        """Ids of (span, is_template) pieces, as one string; `before` are the ids of the document so far.

        Text is joined across spans before encoding, so `User: ` and the user's text are one run.
        """
        return next(self.encode_parts([spans], before))

    def encode_parts(
        self, parts: Iterable[Iterable[tuple[str, bool]]], before: Sequence[int] = ()
    ) -> Iterator[list[int]]:
        """As `encode_rendered`, for each part of one document in turn. About BATCH characters are encoded at a time, so
        that a caller can stop early."""
        last = before[-1] if before else None
        waiting: list[list[int | str]] = []
        size = 0
        for spans in parts:
            waiting.append(list(self._pieces(spans)))
            size += sum(len(piece) for piece in waiting[-1] if isinstance(piece, str)) + 1
            if size >= BATCH:
                for ids in self._encode_pieces(waiting, last):
                    last = ids[-1] if ids else last
                    yield ids
                waiting, size = [], 0
        yield from self._encode_pieces(waiting, last)

    def _pieces(self, spans: Iterable[tuple[str, bool]]) -> Iterator[int | str]:
        """Ids of control tokens, and the runs of text between them."""
        run: list[str] = []
        for span, is_template in spans:
            at = 0
            for control in self.special_pattern.finditer(span) if is_template else ():
                run.append(span[at : control.start()])
                if text := "".join(run):
                    yield text
                run.clear()
                yield self.special_ids[control.group()]
                at = control.end()
            run.append(span[at:])
        if text := "".join(run):
            yield text

    def _encode_pieces(self, parts: Sequence[Sequence[int | str]], last: int | None) -> Iterator[list[int]]:
        # Whether a run gets a space before it depends on the id before it. That is guessed for all runs at once: text
        # has at least one id, and does not end in a control id. The few runs for which that is wrong are done again.
        runs: list[Run] = []
        before: int | str | None = last
        for piece in (piece for part in parts for piece in part):
            if isinstance(piece, str):
                runs.append((piece, not isinstance(before, str) and self._prefix_after(before)))
            before = piece
        encoded = iter(zip(runs, self._encode_runs(runs)))
        for part in parts:
            out: list[int] = []
            for piece in part:
                if isinstance(piece, int):
                    out.append(piece)
                else:
                    (text, guessed), ids = next(encoded)
                    prefix = self._prefix_after(last)
                    out += ids if prefix is guessed else self._encode_runs([(text, prefix)])[0]
                last = out[-1] if out else last
            yield self._check(out)

    def _prefix_after(self, last: int | None) -> bool:
        if self.vocabulary.prefix == "always":
            return last is None or last in self._token_of
        return self.vocabulary.prefix == "first" and last is None

    def _encode_runs(self, runs: Sequence[Run]) -> list[list[int]]:
        encoded = self.vocabulary.encode_many(runs)
        clash = [k for k, ids in enumerate(encoded) if not self._forbidden.isdisjoint(ids)]
        if not clash:
            return encoded
        # The engine knows a control string as a piece: cut each behind its first character, encode around the cuts.
        cut = [
            [(piece, prefix and not n) for n, piece in enumerate(self.cut_specials(text))]
            for text, prefix in (runs[k] for k in clash)
        ]
        pieces = iter(encode_unique([piece for one in cut for piece in one], self.vocabulary.encode_many))
        for k, one in zip(clash, cut):
            encoded[k] = [id for _ in one for id in next(pieces)]
        return encoded

    def cut_specials(self, text: str) -> list[str]:
        """The text in pieces, cut behind the first character of each control string in it."""
        return self._cuts.split(text) if self.special_pattern.search(text) else [text]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        kept = [int(id) for id in ids if not (skip_special and id in self._token_of)]
        return self.vocabulary.decode([id for id in kept if id < self.vocab_size], self._token_of)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """One readable string an id, for showing a sample; a byte piece shows as <0xE6>."""
        return [self.vocabulary.show(int(id)) if id < self.vocab_size else f"<id {id}>" for id in ids]


def load_tokenizer(folder: str | Path, rows: int | None = None) -> Tokenizer:
    """rows: of the embedding its ids are for; a token beyond them is refused wherever it occurs."""
    folder = Path(folder)
    refuse_added_tokenizer(folder)
    settings = _read_settings(folder)
    for name in (*SENTENCEPIECE_NAMES, "tokenizer.json"):
        refuse_special(folder / name, CheckpointError)
    model = next((folder / name for name in SENTENCEPIECE_NAMES if (folder / name).is_file()), None)
    json_file = folder / "tokenizer.json"
    # ERNIE ships both; its checkpoints were trained through the SentencePiece file. Elsewhere tokenizer.json is
    # what servers load, so it is what we train with.
    if json_file.is_file() and not (model and settings.ernie):
        main = json_file
    elif model:
        main = model
    else:
        raise CheckpointError(
            f"no tokenizer in {folder.name or folder}",
            where=str(folder),
            fix="the folder needs tokenizer.model (SentencePiece) or tokenizer.json next to its config.json",
        )
    if main.stat().st_size > MAX_BYTES:
        raise CheckpointError(
            f"{main.name} has {main.stat().st_size / 2**20:,.0f} MiB; the limit is {MAX_BYTES >> 20} MiB",
            where=str(main),
            fix="no tokenizer is that large: download it again",
        )
    vocabulary: Vocabulary
    if main == json_file:
        vocabulary = JsonVocabulary(main)
    else:
        vocabulary = SentencePieceVocabulary(main, settings.added, settings.add_prefix_space, settings.legacy)
    return Tokenizer(folder, vocabulary, settings, [main, *settings.files], rows)


def _control_tokens(vocabulary: Vocabulary, settings: _Settings) -> dict[str, int]:
    listed = {*settings.roles.values(), *settings.extra, *settings.added_special}
    declared = vocabulary.declared() if isinstance(vocabulary, JsonVocabulary) else {}
    listed.update(token for token, special in declared.items() if special)
    # Some folders list only a few of the markers their vocabulary holds.
    listed.update(token for token in vocabulary.tokens() if token[:1] == "<" and _MARKER.fullmatch(token))
    found = {}
    for token in sorted(listed - GENERATED):
        id = vocabulary.id_of(token)
        if id is not None and len(token) > 1:  # a single character (a newline) is text in any case
            found[token] = id
    if isinstance(vocabulary, JsonVocabulary):
        vocabulary.set_control(set(found))
    elif isinstance(vocabulary, SentencePieceVocabulary):
        vocabulary.forget(found)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _fingerprint(vocabulary: Vocabulary, settings: _Settings, main: Path, special: dict[str, int]) -> str:
    digest = hashlib.sha256(main.read_bytes())
    values = {
        "rules": _RULES,
        "roles": settings.roles,
        "special": special,
        "added": settings.added,
        "templates": [settings.chat_template, settings.tool_template],
        "prefix": vocabulary.prefix,
        "add_bos": settings.add_bos,
    }
    digest.update(json.dumps(values, sort_keys=True).encode())
    return digest.hexdigest()


def _read_settings(folder: Path) -> _Settings:
    out = _Settings()
    files = [folder / name for name in SETTINGS_NAMES]
    config, token_map, added = read_settings(files[0]), read_settings(files[1]), read_added(files[2])
    out.files += [file for file in files if file.is_file()]
    for source in (token_map, config):  # the newer file, tokenizer_config.json, wins
        out.roles.update({role: text for role in ROLES if (text := _content(source.get(role)))})
        for key in ("additional_special_tokens", "extra_special_tokens"):
            listed = source.get(key) or []
            values = listed.values() if isinstance(listed, dict) else listed
            out.extra += [text for value in values if (text := _content(value))]
    out.added.update(added)
    for number, entry in (config.get("added_tokens_decoder") or {}).items():
        content = _content(entry)
        if content and re.fullmatch("[0-9]{1,9}", str(number)):
            out.added[content] = int(number)
            if isinstance(entry, dict) and entry.get("special"):
                out.added_special.add(content)
    out.roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **out.roles}
    out.add_bos, out.add_prefix_space = config.get("add_bos_token"), config.get("add_prefix_space")
    out.legacy = bool(config.get("legacy", False))
    _read_templates(folder, config, out)
    model_type = read_settings(folder / "config.json").get("model_type")
    out.ernie = "ernie" in f"{config.get('tokenizer_class')} {model_type}".lower()
    return out


def _read_templates(folder: Path, config: dict[str, Any], out: _Settings) -> None:
    given = config.get("chat_template")
    if isinstance(given, str):
        out.chat_template = given
    elif isinstance(given, list):
        named = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
        out.chat_template, out.tool_template = named.get("default"), named.get("tool_use")
    file = folder / "chat_template.jinja"
    if (text := read_template(file)) is not None:
        out.chat_template = text
        out.files.append(file)


def _content(token: Any) -> str | None:
    """A token is written as its text, or as an object that holds it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None
