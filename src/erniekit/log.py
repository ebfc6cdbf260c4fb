"""Output for a person: one stream, rank 0, plain lines; colour only on a terminal."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import MutableMapping, Sequence
from typing import TextIO

from erniekit.printable import plain_lines, public

_said: set[str] = set()
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}


def stream() -> TextIO:
    return sys.stdout


def is_main_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def drop_stray_rank(env: MutableMapping[str, str] | None = None) -> None:
    """A RANK that a platform or a shell left to a process which is alone: with it the command would print nothing and
    keep no records, as ranks other than 0 do."""
    env = os.environ if env is None else env
    if env.get("RANK", "0") not in ("", "0") and env.get("WORLD_SIZE", "1") in ("", "1"):
        warn(f"RANK={env.pop('RANK')} of the environment is not read: WORLD_SIZE names no other ranks")


def colour_on(out: TextIO | None = None) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (out or stream()).isatty()


def paint(text: str, *styles: str, on: bool | None = None) -> str:
    if not styles or not (colour_on() if on is None else on):
        return text
    return f"\x1b[{';'.join(_CODES[s] for s in styles)}m{text}\x1b[0m"


def emit(text: str = "", own_address: str = "") -> None:
    """own_address: printed after the text as it is, with the token that lets the user in."""
    if is_main_rank():
        print(plain_lines(text) + own_address, file=stream(), flush=True)


def typed(*arguments: object) -> str:
    """An erniekit command line, quoted for a shell: `typed("chat", folder)`."""
    return shlex.join(["erniekit", *map(str, arguments)])


_SECRET_NAMES = ("api_key", "http_proxy")  # parts of the names of secret keys; log.py does not import their table


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """A command line without the value of a key that is secret, and without passwords and signatures of addresses."""
    out, hide = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        secret = any(part in name.replace("-", "_") for part in _SECRET_NAMES)
        out.append("***" if hide else f"{name}=***" if secret and equals else public(argument))
        hide = secret and not equals
    return out


def warn(text: str) -> None:
    if is_main_rank():
        head = paint("warning: ", "yellow", on=colour_on(sys.stderr))
        print(head + plain_lines(text), file=sys.stderr, flush=True)


def emit_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        emit(text)


def warn_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warn(text)
