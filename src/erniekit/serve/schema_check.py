"""Whether llguidance can compile a JSON schema, and which part of it is wrong. Used by structured.py, and run as a
process of its own by schema_probe.py: some schemas take llguidance for ever, and a thread cannot be ended.

Imports nothing of erniekit, so that the process starts quickly.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

MEMORY = 2 << 30  # bytes of address space of the process
# Of one mask: about 7 ms of the lexer and 1 ms of the parser, a small part of what a step of a real model takes.
STEP_FUEL, STEP_ITEMS = 100_000, 20_000
# One blank, or a new line and its indent: unlimited blanks between two values are a loop that models fall into.
RULES = {"whitespace_pattern": r"( |\n( {0,16}|\t{0,8}))", "lenient": False}
MAX_LOOKS = 400  # subschemas that are compiled separately to find the one that cannot be


def first_wrong(parts: Sequence[tuple[Any, str]]) -> tuple[str, str] | None:
    """parts: schemas and their places in the request -> where and why the first bad one cannot be compiled."""
    for schema, place in parts:
        if why := _wrong(schema):
            return _place_of(schema, place, why)
    return None


def options() -> dict[str, Any]:
    from llguidance import LLParserLimits

    limits = LLParserLimits(step_lexer_fuel=STEP_FUEL, step_max_items=STEP_ITEMS, verbose_errors=False)
    return {"log_level": 0, "limits": limits}


def with_rules(schema: Any) -> dict[str, Any]:
    """The server decides how JSON is written: a schema's own `x-guidance` has no effect."""
    body = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
    return {**body, "x-guidance": RULES}


def _wrong(schema: Any) -> str:
    """Why it cannot be compiled; empty: it can."""
    if not isinstance(schema, dict | bool):
        return "schema must be an object or boolean"
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema if isinstance(schema, bool) else with_rules(schema)))
    bad, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=options()["limits"])
    return plain_message(messages[0]) if bad else ""


def plain_message(message: str) -> str:
    """One line for a client; a panic's text is of no use to one."""
    if "panic" in message:
        return "the schema is too large"
    if "NoExtension" in message:
        return "no value fits the schema"
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line.replace("Unimplemented keys", "not supported")[:300]


def _place_of(schema: Any, place: str, why: str) -> tuple[str, str]:
    """The innermost schema that cannot be compiled by itself, and why."""
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
    """Schemas directly inside of one, with the key that leads there."""
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


def main() -> None:
    """A line of JSON in, [seconds, [[schema, place], ...]]; a line out, [place, why] or null."""
    with suppress(ValueError, OSError):  # a system without this limit still has that of time
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin:
        seconds, parts = json.loads(line)
        # Of processor time. The signal's default action ends the process, whatever native code is at work.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        found = first_wrong(parts)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
