"""Secrets of a script or recipe: what they are recognised by, and texts without them.

Called by runs.py. A secret is recognised by its name or by its own pattern; one that was found is hidden
wherever else it occurs, since a script passes it on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HIDDEN = "***"
_SHORTEST = 6  # characters: a shorter value, or a plain word such as True, may occur by chance
_ALWAYS = ("secret", "passw", "credential", "apikey", "authorization")
_LAST = ("key", "token")  # only where a name ends in it: max_tokens and num_key_value_heads are no secrets
_MARKS = {"pad", "eos", "bos", "unk", "cls", "sep", "mask", "image", "video", "special"}  # eos_token is no secret
_SHAPES = re.compile(
    r"(?P<before>://)[^/\s:@]*:[^/\s@]+(?=@)"  # the user and password of an address
    r"|(?P<query>[?&](?:access_|auth_|api_?)?(?:token|key|sig|signature|password)=)[^&\s'\"]+"
    r"|(?P<head>(?:Bearer|Basic)\s+)[\w.~+/=-]{6,}"
    r"|\b(?:sk|pk|rk)-[\w-]{4,}|\bhf_\w{8,}|\bgh[pousr]_\w{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{12,}"
    r"|\bAKIA[0-9A-Z]{12,}|\bxox[abprs]-[\w-]{8,}|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
)


def is_secret(name: str) -> bool:
    """Whether a value under this name is one: WANDB_API_KEY, hf-token, dbPassword."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    arguments = [argument.lower() for argument in parts]
    if not arguments or arguments[-1] in ("file", "path", "dir"):
        return False
    joined = "".join(arguments)
    if any(argument in joined for argument in _ALWAYS):
        return True
    last = arguments[:-1] if arguments[-1] == "id" and len(arguments) > 2 else arguments  # AWS_ACCESS_KEY_ID
    return last[-1].endswith(_LAST) and not _MARKS & set(last)


@dataclass
class Secrets:
    values: set[str] = field(default_factory=set)

    def add(self, name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for inner, item in value.items():
                self.add(str(inner), item)
        elif isinstance(value, str) and is_secret(name) and _is_distinctive(value):
            self.values.add(value)

    def add_arguments(self, arguments: Sequence[str]) -> None:
        """Of a command: --token VALUE, --token=VALUE, login VALUE."""
        for argument, following in zip(arguments, [*arguments[1:], ""]):
            name, equals, value = argument.lstrip("-").partition("=")
            if equals:
                self.add(name, value)
            elif (argument.startswith("-") or argument == "login") and not following.startswith("-"):
                self.add(name if argument != "login" else "secret", following)

    def hide(self, text: str) -> str:
        for value in sorted(self.values, key=len, reverse=True):
            text = text.replace(value, HIDDEN)
        return _SHAPES.sub(lambda found: next((g for g in found.groups() if g), "") + HIDDEN, text)

    def in_value(self, value: Any) -> bool:
        """Whether a secret is part of it; of a mapping also by the names in it."""
        if isinstance(value, Mapping):
            return any((is_secret(str(name)) and item) or self.in_value(item) for name, item in value.items())
        if isinstance(value, str):
            return self.hide(value) != value
        return isinstance(value, Iterable) and any(self.in_value(item) for item in value)


def _is_distinctive(value: str) -> bool:
    plain = value.lower() in ("true", "false") or re.fullmatch(r"[\d.,]+|\$\w*|\$[{(].*[})]|`.*`", value)
    return len(value) >= _SHORTEST and not plain
