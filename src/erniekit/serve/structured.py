"""Grammars of answers, compiled by llguidance: which tokens may come next. The one file that imports it (extra
`structured`).

Used by grammar_work.py, in its threads. llguidance parses bytes and releases the interpreter lock while it computes;
compiling and every mask have a budget of work, so that no schema can hold the engine up for long.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from erniekit.data.token_bytes import token_bytes
from erniekit.data.tokenizer import Tokenizer
from erniekit.serve.output_grammar import OutputGrammar
from erniekit.serve.output_parser import THINK_END

PACKAGE = "llguidance"
# Of one mask: about 7 ms of the lexer and 1 ms of the parser, a small part of what a step of a real model takes.
STEP_FUEL, STEP_ITEMS = 100_000, 20_000
# One blank, or a new line and its indent: unlimited blanks between two values are a loop that models fall into.
RULES = {"whitespace_pattern": r"( |\n( {0,16}|\t{0,8}))", "lenient": False}
MAX_LOOKS = 400  # subschemas that are compiled alone to find the one that cannot be


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

        spelled = token_bytes(tokenizer)
        if spelled is None:
            raise NoGrammar
        special = [id for id in range(vocab) if tokenizer.is_special(id)]
        for id in special:
            spelled[id] = tokenizer.decode([id], skip_special=False).encode()
        held = _Tokens(spelled[:vocab], special, tokenizer)
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


def compile_grammar(grammar: OutputGrammar, table: TokenTable, opened: bool) -> CompiledGrammar:
    """opened: the prompt has begun a thought, which ends before the grammar begins. Raises BadGrammar."""
    from llguidance import LLMatcher

    for part in grammar.parts:
        if why := _wrong(json.loads(part.schema)):
            raise BadGrammar(*_place_of(json.loads(part.schema), part.place, why))
    matcher = LLMatcher(table.native, LLMatcher.grammar_from_lark(_lark(grammar, table, opened)), **_options())
    matcher.compute_bitmask()  # some limits show with the first mask
    if matcher.is_error():
        raise BadGrammar(grammar.param, _words(matcher.get_error()))
    matcher.reset()
    return CompiledGrammar(matcher)


def _lark(grammar: OutputGrammar, table: TokenTable, opened: bool) -> str:
    rules = []
    for k, part in enumerate(grammar.parts):
        value = f"part_{k}: {_text(part.before)} json_{k} {_text(part.after)}"
        rules += [value, f"json_{k}: %json {json.dumps(_with_rules(json.loads(part.schema)))}"]
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


def _options() -> dict[str, Any]:
    from llguidance import LLParserLimits

    limits = LLParserLimits(step_lexer_fuel=STEP_FUEL, step_max_items=STEP_ITEMS, verbose_errors=False)
    return {"log_level": 0, "limits": limits}


def _with_rules(schema: Any) -> dict[str, Any]:
    """How JSON is written is the server's to say: a schema's own `x-guidance` has no effect."""
    body = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
    return {**body, "x-guidance": RULES}


def _wrong(schema: Any) -> str:
    """Why it cannot be compiled; empty: it can."""
    if not isinstance(schema, dict | bool):
        return "schema must be an object or boolean"
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema(
        json.dumps(schema if isinstance(schema, bool) else _with_rules(schema))
    )
    bad, said = LLMatcher.validate_grammar_with_warnings(grammar, limits=_options()["limits"])
    return _words(said[0]) if bad else ""


def _words(message: str) -> str:
    """One line for a client; a panic's text is of no use to one."""
    if "panic" in message:
        return "the schema is too large"
    if "NoExtension" in message:
        return "no value fits the schema"
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line.replace("Unimplemented keys", "not supported")[:300]


def _place_of(schema: Any, place: str, why: str) -> tuple[str, str]:
    """The innermost schema that cannot be compiled alone, and why."""
    shared = {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, dict) and name in schema}
    looks = 0
    inner = schema
    found = True
    while found:
        found = False
        for name, child in _children(inner):
            looks += 1
            if looks > MAX_LOOKS:
                return place, why
            if reason := _wrong({**shared, **child} if isinstance(child, dict) else child):
                place, inner, why, found = f"{place}{name}", child, reason, True
                break
    return place, why


def _children(schema: Any) -> Iterator[tuple[str, Any]]:
    """Schemas directly inside of one, with the word that leads there."""
    if not isinstance(schema, dict):
        return
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        held = schema.get(name)
        for key, child in held.items() if isinstance(held, dict) else ():
            yield f".{name}.{key}", child
    for name in ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"):
        if isinstance(schema.get(name), dict):
            yield f".{name}", schema[name]
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        held = schema.get(name)
        for k, child in enumerate(held if isinstance(held, list) else ()):
            yield f".{name}[{k}]", child
