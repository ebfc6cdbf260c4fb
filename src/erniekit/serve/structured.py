"""Grammars of answers, compiled by llguidance: which tokens may come next. Beside schema_check.py the one file that
imports it (extra `structured`).

Used by grammar_work.py, in its threads. llguidance parses bytes and releases the interpreter lock while it computes;
compiling and every mask have a budget of work, so that no schema can hold the engine up for long.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from erniekit.data.tokenizer import Tokenizer
from erniekit.serve.output_grammar import OutputGrammar
from erniekit.serve.output_parser import THINK_END
from erniekit.serve.schema_check import options, plain_message, with_rules

PACKAGE = "llguidance"


class BadGrammar(Exception):
    """A schema that cannot be compiled; place: of the part of the request."""

    def __init__(self, place: str, why: str) -> None:
        super().__init__(f"{place}: {why}")
        self.place = place


class NoGrammar(Exception):
    """The tokenizer's tokens cannot be spelled in bytes."""


def is_installed() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


class TokenTable:
    """A tokenizer's tokens as llguidance keeps them. vocab: ids that may be drawn; ends: ids that end an answer."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: frozenset[int]) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        token_texts = tokenizer.token_bytes()
        if token_texts is None:
            raise NoGrammar
        special = [id for id in range(vocab) if tokenizer.is_special(id)]
        for id in special:
            token_texts[id] = tokenizer.decode([id], skip_special=False).encode()
        held = _Tokens(token_texts[:vocab], special, tokenizer)
        self.first_blank = tokenizer.vocabulary.prefix != "never"  # decoding drops one blank of the text's first token
        self.native = LLTokenizer(TokenizerWrapper(held), eos_token=sorted(id for id in ends if id < vocab))


@dataclass
class _Tokens:
    """What TokenizerWrapper takes."""

    tokens: list[bytes]
    special_token_ids: list[int]
    tokenizer: Tokenizer
    bos_token_id: int | None = None

    @property
    def eos_token_id(self) -> int:
        return self.tokenizer.eos_id

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text is encoded, not bytes")
        return self.tokenizer.encode_text(text)


class CompiledGrammar:
    """A grammar for the tokens of one tokenizer; each sequence starts its own matcher."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def start(self) -> Matcher:
        return Matcher(self._matcher.deep_copy())


class Matcher:
    """The state of one sequence."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._consumed = 0
        self.problem = ""  # why no token can be given any more

    def allowed(self, generated: Sequence[int]) -> np.ndarray:
        """int32, a bit per token: those that may come behind `generated`, which only ever grows. All zero if there is a
        problem."""
        new = generated[self._consumed :]
        self._consumed = len(generated)
        if new:
            self._matcher.consume_tokens(list(new))
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        if self._matcher.is_error():
            self.problem = "the schema became too complex while the answer was written"
            return np.zeros_like(mask)
        return mask


def build_grammar(grammar: OutputGrammar, table: TokenTable, opened: bool) -> CompiledGrammar:
    """Of schemas that schema_check.py has checked: it reports what is wrong, and bounds the time that takes.
    opened: the prompt has begun a thought, which ends before the grammar begins. Raises BadGrammar."""
    from llguidance import LLMatcher

    matcher = LLMatcher(table.native, LLMatcher.grammar_from_lark(_lark(grammar, table, opened)), **options())
    matcher.compute_bitmask()  # some limits show with the first mask
    if matcher.is_error():
        raise BadGrammar(grammar.param, plain_message(matcher.get_error()))
    matcher.reset()
    return CompiledGrammar(matcher)


def _lark(grammar: OutputGrammar, table: TokenTable, opened: bool) -> str:
    rules = []
    for k, part in enumerate(grammar.parts):
        value = f"part_{k}: {_text(part.before)} json_{k} {_text(part.after)}"
        rules += [value, f"json_{k}: %json {json.dumps(with_rules(json.loads(part.schema)))}"]
    one = " | ".join(f"part_{k}" for k in range(len(grammar.parts)))
    start = [f"({one})"]
    if grammar.repeated:
        start.append(f'("\\n"? ({one}))*')
    if opened:
        start = ["thought", r"/[ \n]{0,4}/", *start]
        rules.append(f"thought[suffix={_text(THINK_END)}]: /(?s:.*)/")
    elif table.first_blank:
        start = ["/ ?/", *start]
    return "\n".join([f"start: {' '.join(start)}", *rules]) + "\n"


def _text(text: str) -> str:
    return json.dumps(text) if text else ""
