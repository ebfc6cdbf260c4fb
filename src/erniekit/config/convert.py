"""A YAML value, a command-line argument or a Python argument -> the type its key declares.

Used by sources for every value that comes in, and by RunConfig.replace.
"""

from __future__ import annotations

import math
from typing import Any

from erniekit.config.field import Key
from erniekit.errors import ConfigError
from erniekit.registry import nearest

TRUE, FALSE = ("true", "1", "yes", "on", "y", "t"), ("false", "0", "no", "off", "n", "f")
NOTHING = ("None", "null", "~")
_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "True or False",
    "str": "text",
    "Mapping[str, Any]": "a mapping",
}


def convert(k: Key, value: Any, where: str) -> Any:
    """The value as `k` declares it, or a ConfigError with the given value and what is expected."""
    if value is None or (isinstance(value, str) and value in NOTHING):
        if k.optional or k.is_list:
            return () if k.is_list else None
        raise _refuse(k, value, where)
    if k.is_list:
        items = tuple(_one(k, item, where) for item in _split(k, value, where))
        return items if items != ("none",) else ()
    if k.optional and k.kind != "str" and isinstance(value, str) and not value.strip():
        return None
    return _one(k, value, where)


def expected(k: Key) -> str:
    """A description of `k`'s values, for errors and help."""
    one = _NAMES.get(k.item, "a value")
    if k.choices:
        one = "one of " + ", ".join(c or "''" for c in _choices(k))
    elif k.low is not None and k.high is not None:
        one += f" from {k.low:g} to {f'{k.high:,.0f}' if k.high >= 1e5 else f'{k.high:g}'}"
    elif k.low is not None:
        one += f", {k.low:g} or more"
    return f"a list, each {one}" if k.is_list else one


def _choices(k: Key) -> list[str]:
    """With those that installed packages add."""
    return [*k.choices, *(k.further.installed() if k.further is not None else ())]


def _split(k: Key, value: Any, where: str) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    if not isinstance(value, str):
        return [value]
    text = value.strip()
    if text[:1] in "[(" and text[-1:] in "])":
        text = text[1:-1]
    items = text.split(",") if k.commas else text.replace(",", " ").split()
    return [item.strip().strip("'\"") for item in items if item.strip()]


def _one(k: Key, value: Any, where: str) -> Any:
    kind = k.item
    if kind == "object":
        return value
    if kind == "Mapping[str, Any]":
        return _mapping(k, value, where)
    if kind == "str":
        return _text(k, value, where)
    if kind == "bool":
        return _truth(k, value, where)
    number = _number(k, value, where)
    if (k.low is not None and number < k.low) or (k.high is not None and number > k.high):
        raise _refuse(k, value, where)
    return number


def _text(k: Key, value: Any, where: str) -> str:
    if isinstance(value, bool) and k.choices:  # YAML reads `off` and `no` as False
        items = TRUE if value else (*FALSE, "none")
        value = next((c for c in k.choices if c in items), str(value))
    if isinstance(value, (dict, list, tuple)):
        raise _refuse(k, value, where)
    text = str(value)
    if "\0" in text:
        came = "" if k.secret else f": {text!r}"
        raise ConfigError(f"{k.name} holds a NUL character{came}", where=where, fix="leave \\0 out")
    if not k.choices or text in k.choices or (k.further is not None and text in k.further):
        return text
    for choice in k.choices:
        if choice.lower() == text.lower():
            return choice
    raise _refuse(k, value, where)


def _truth(k: Key, value: Any, where: str) -> bool:
    item = str(value).strip().lower()
    if isinstance(value, float) and value in (0.0, 1.0):
        item = str(int(value))
    if item in TRUE or item in FALSE:
        return item in TRUE
    raise _refuse(k, value, where)


def _number(k: Key, value: Any, where: str) -> int | float:
    if isinstance(value, (bool, dict, list, tuple)):
        raise _refuse(k, value, where)
    try:
        if isinstance(value, int) or (isinstance(value, str) and value.strip().lstrip("+-").isdecimal()):
            return int(value) if k.item == "int" else float(value)
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise _refuse(k, value, where) from None
    if not math.isfinite(number) or (k.item == "int" and number != int(number)):
        raise _refuse(k, value, where)
    return int(number) if k.item == "int" else number


def _mapping(k: Key, value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        from erniekit.config.files import parse_value

        value = parse_value(value, where)
    if not isinstance(value, dict):
        raise _refuse(k, value, where)
    return value


def _proposal(k: Key) -> str:
    """What to write instead: an example for numbers, whose help text would not answer the question."""
    if k.choices:
        return k.help + (f" Write one of these, e.g. {k.default}." if k.default and k.default in k.choices else "")
    if k.item not in ("int", "float"):
        return k.help
    usual = k.default if isinstance(k.default, (int, float)) and k.default > 0 else max(1, k.low or 0)
    return f"write {expected(k)}, e.g. {k.example or format(usual, 'g')}"


def _refuse(k: Key, value: Any, where: str) -> ConfigError:
    near = nearest(value, _choices(k)) if isinstance(value, str) and k.choices else []
    came = "***" if k.secret else "nothing" if value is None else repr(value)
    written = k.elsewhere(str(value)) if k.elsewhere is not None else None
    fix = written or (f"did you mean {near[0]}?" if near else _proposal(k))
    return ConfigError(f"{k.name} is {came}; expected {expected(k)}", where=where, fix=fix)
