"""What a package's reader made of a row, compared with what its table says it makes. Called by formats/__init__.py.

What is of another kind would fail later, in code of ours, or be trained on as something else: a role that no template
knows, for example.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from erniekit.data.formats.message import ROLES
from erniekit.data.types import ChatMessage
from erniekit.printable import is_utf8

_ROLES = tuple(dict.fromkeys(ROLES.values()))
_MESSAGES = ("messages", "prompt", "chosen", "rejected", "answer")
_HALF = "holds half of a surrogate pair, which UTF-8 cannot write"


def unlike(found: Any, gives: type, several: bool) -> str:
    """How it differs from a `gives`, or from a list of them; empty: it does not."""
    if not several:
        return _unlike(found, gives) if isinstance(found, gives) else f"it gave {_kind(found)}, not a {gives.__name__}"
    wanted = f"not a list of {gives.__name__}"
    if not isinstance(found, (list, tuple)):
        return f"it gave {_kind(found)}, {wanted}"
    for row in found:
        if not isinstance(row, gives):
            return f"it gave a list with {_kind(row)}, {wanted}"
        if problem := _unlike(row, gives):
            return problem
    return "" if found else "it gave an empty list; of a row that it cannot use it raises BadRow"


def _unlike(row: Any, gives: type) -> str:
    for field in fields(row):
        if problem := _problem(field.name, getattr(row, field.name)):
            return f"it gave a {gives.__name__} with {problem}"
    return ""


def _problem(name: str, value: Any) -> str:
    if name in ("text", "label"):
        if not isinstance(value, str):
            return f"`{name}` {value!r}, which is no text"
        return "" if is_utf8(value) else f"`{name}` that {_HALF}"
    if name in (*_MESSAGES, "tools", "unused") and not isinstance(value, (list, tuple)):
        return f"`{name}` {_kind(value)}, not a tuple"
    if name in _MESSAGES:
        return next(filter(None, (_of_message(message, name) for message in value)), "")
    if name == "unused":
        return next((f"{_kind(one)} in `unused`, not text" for one in value if not isinstance(one, str)), "")
    return _of_objects(name, value) if name == "tools" else ""


def _of_message(message: Any, name: str) -> str:
    if not isinstance(message, ChatMessage):
        return f"{_kind(message)} in `{name}`, not a ChatMessage"
    if message.role not in _ROLES:
        return f"a message of role {message.role!r}; roles are {', '.join(_ROLES)}"
    for field, text in (("content", message.content), ("thought", message.thought)):
        if not isinstance(text, str):
            return f"a message whose `{field}` is {_kind(text)}, not text"
        if not is_utf8(text):
            return f"a message whose `{field}` {_HALF}"
    if not isinstance(message.tool_calls, (list, tuple)):
        return f"a message whose `tool_calls` is {_kind(message.tool_calls)}, not a tuple"
    return _of_objects("tool_calls", message.tool_calls)


def _of_objects(name: str, values: Sequence[Any]) -> str:
    """Templates are given them as they are, and print them as JSON: each must be an object of it."""
    if not values:
        return ""
    try:
        written = json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"`{name}` that are not JSON: {error}"
    for value in values:
        if not isinstance(value, dict):
            return f"{_kind(value)} in `{name}`, not an object (a dict)"
    if strange := next(_other_keys(values), None):
        return f"`{name}` that are not JSON: a key is {strange}, not text"
    return "" if is_utf8(written) else f"`{name}` with text that {_HALF}"


def _other_keys(value: Any) -> Iterator[str]:
    """What keys are that json.dumps would turn into texts."""
    if isinstance(value, dict):
        yield from (_kind(key) for key in value if not isinstance(key, str))
    if isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _other_keys(inner)


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
