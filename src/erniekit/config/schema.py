"""The keys of a recipe as a JSON schema (draft 7), so that editors complete and check them.

Printed by `erniekit config --schema`; docs/recipe.schema.json is that output. It accepts what convert.py accepts: text
for numbers (YAML 1.1 reads `5e-7` as text), 0 and 1 for truth values, choices in any case, lists as text with commas.
"""

from __future__ import annotations

import json
from typing import Any

from erniekit.config.convert import FALSE, NOTHING, TRUE
from erniekit.config.extends import BASE
from erniekit.config.field import Key
from erniekit.config.flat import ALIASES, IGNORED_KEYS, KEYS
from erniekit.config.paddleformers import NO_COUNTERPART
from erniekit.config.sources import SECTIONED

Schema = dict[str, Any]

_NUMBER = r"^\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*$"


def recipe_schema() -> Schema:
    """The whole schema: every key, its other names, keys without effect, `base`, and the sections of pre-training."""
    properties = {name: _of_key(k) for name, k in KEYS.items()}
    properties |= {alias: _alias(alias, name) for alias, name in ALIASES.items()}
    properties |= {name: _idle(f"Accepted without effect: {why}.") for name, why in IGNORED_KEYS.items()}
    properties |= {name: _idle(f"No counterpart here unless it is off: {why}.") for name, why in NO_COUNTERPART.items()}
    sections = {name: {"$ref": "#"} for name in SECTIONED[1:]}  # they hold the same keys
    base = {"type": "string", "description": "A recipe that this one extends; its path is relative to this file."}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "erniekit recipe",
        "description": "Keys of a run: flat, or in the sections of ERNIE's pre-training recipes.",
        "type": "object",
        "properties": {BASE: base, **sections, **properties},
        "additionalProperties": False,
    }


def schema_text() -> str:
    """The schema as it is printed and committed: a line for each key, so that a change of one changes one line."""
    schema = recipe_schema()
    lines = [f"  {_json(name)}: {_json(part)}" for name, part in schema.pop("properties").items()]
    rest = [f" {_json(name)}: {_json(part)}" for name, part in schema.items()]
    return "{\n" + ",\n".join([*rest, ' "properties": {\n' + ",\n".join(lines) + "\n }"]) + "\n}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _of_key(k: Key) -> Schema:
    kinds = _list(k) if k.is_list else _value(k)
    if k.optional or k.is_list:
        kinds = [*kinds, {"type": "null"}, {"enum": list(NOTHING)}]
    about = k.help if not k.not_yet else f"{k.help} (read by a later version)"
    out: Schema = {"title": f"{k.name} ({k.section})", "description": about, "anyOf": _merged(kinds)}
    if k.default not in (None, ()):
        out["default"] = list(k.default) if isinstance(k.default, tuple) else k.default
    return out


def _list(k: Key) -> list[Schema]:
    item = _value(k)
    return [*item, {"type": "array", "items": {"anyOf": _merged(item)}}, {"type": "string"}]


def _value(k: Key) -> list[Schema]:
    """What one value may be, the plain form first: editors offer that."""
    kind = k.item
    if kind == "object":
        return [{}]
    if kind == "Mapping[str, Any]":
        return [{"type": "object"}, {"type": "string"}]
    if kind == "bool":
        return [{"type": "boolean"}, {"enum": [0, 1]}, _any_case((*TRUE, *FALSE))]
    if kind == "str":
        return _text(k)
    bounds = {name: bound for name, bound in (("minimum", k.low), ("maximum", k.high)) if bound is not None}
    number = "integer" if kind == "int" else "number"
    return [{"type": number, **bounds}, {"type": "string", "pattern": _NUMBER}]


def _text(k: Key) -> list[Schema]:
    if not k.choices:
        return [{"type": "string"}, {"type": ["number", "boolean"]}]  # `run_name: 7` is text too
    schemas: list[Schema] = [{"enum": list(k.choices)}]
    if any(c.lower() in (*TRUE, *FALSE, "none") for c in k.choices):
        schemas.append({"type": "boolean"})  # YAML reads `off` and `no` as False
    return [*schemas, {"type": "string"}] if k.further is not None else [*schemas, _any_case(k.choices)]


def _any_case(schemas: tuple[str, ...]) -> Schema:
    """One of the values, in any case. JSON schema's patterns have no flag for it."""

    def letters(value: str) -> str:
        parts = (f"[{c.lower()}{c.upper()}]" if c.isalpha() else "\\" + c if not c.isalnum() else c for c in value)
        return "".join(parts)

    return {"type": "string", "pattern": f"^({'|'.join(letters(value) for value in schemas)})$"}


def _merged(kinds: list[Schema]) -> list[Schema]:
    """Without repetitions, and one that takes everything alone."""
    if {} in kinds:
        return [{}]
    return [kind for i, kind in enumerate(kinds) if kind not in kinds[:i]]


def _alias(alias: str, name: str) -> Schema:
    if name not in KEYS:
        return _idle(f"Another name of {name}, accepted without effect: {IGNORED_KEYS[name]}.")
    return {"description": f"{alias}: another name of {name}. {KEYS[name].help}", "anyOf": _of_key(KEYS[name])["anyOf"]}


def _idle(why: str) -> Schema:
    return {"description": why, "deprecated": True}
