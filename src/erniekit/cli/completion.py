"""`erniekit completion SHELL`: tab completion for bash, zsh and fish; `completion --words ...` answers their scripts.

Called by cli.main. The scripts ask this program on every tab, so commands, keys, values and recipes are those of the
installed version. No torch in here: an answer takes as long as `erniekit --help`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator

from erniekit.cli.commands import COMMANDS, KEYLESS
from erniekit.cli.completion_scripts import SCRIPTS
from erniekit.errors import ConfigError, ErnieKitError

RECIPES = (".yaml", ".yml", ".json")
_SECOND = {"demo": ("vision",), "completion": tuple(SCRIPTS), "help": tuple(COMMANDS)}
_FLAG = re.compile(r"--[a-z][a-z-]*")

Candidate = tuple[str, str]  # the text to insert, and a short description


def completion_command(args: list[str]) -> int:
    if args[:1] == ["--words"]:
        print("".join(f"{option}\t{about}\n" for option, about in complete(args[1:])), end="")
        return 0
    if len(args) != 1 or args[0] not in SCRIPTS:
        came = f"{' '.join(args)!r} is not a supported shell" if args else "no shell given"
        raise ConfigError(came, where="command line", fix="erniekit completion bash, zsh or fish")
    print(SCRIPTS[args[0]], end="")
    return 0


def complete(arguments: list[str]) -> list[Candidate]:
    """What the last argument after `erniekit` may become; it is empty when a new one begins."""
    *before, last = arguments or [""]
    try:
        found = _first() if not before else _of_command(before[0], before[1:], last)
        return [(option, about) for option, about in found if option.startswith(last) and "\n" not in option]
    except (ErnieKitError, OSError):  # a tab never answers with an error
        return []


def _first() -> Iterator[Candidate]:
    for name, command in COMMANDS.items():
        yield name, command.about


def _of_command(name: str, before: list[str], last: str) -> Iterator[Candidate]:
    if name not in COMMANDS:
        return
    previous = before[-1] if before else ""
    if previous in ("--help", "-h") and name not in KEYLESS:
        yield from _topics()
        return
    if not before and (second := (*_SECOND.get(name, ()), *(part for part, _ in COMMANDS[name].parts))):
        yield from ((option, "") for option in second)
    if name in ("help", "version", "completion"):
        return
    if name == "recipes" and not last.startswith("-"):
        yield from _shipped()
    elif last.startswith("--") and "=" not in last:
        yield from _flags(name)
    elif previous.startswith("--") and _takes_value(previous[2:]):
        yield from _values(previous[2:], last, "")
    elif "=" in last:
        key, _, text = last.partition("=")
        yield from _values(key.lstrip("-"), text, f"{key}=")
    else:
        yield from _keys(name, last)
        yield from _paths(last, "", (".jsonl", ".parquet", ".gz", *RECIPES) if name == "data" else RECIPES)


def _topics() -> Iterator[Candidate]:
    from erniekit.config.flat import KEYS
    from erniekit.config.sections import SECTIONS

    yield "all", "every key"
    yield from ((section, "section") for section in SECTIONS if section not in KEYS)
    yield from ((k.name, k.help) for k in KEYS.values())


def _shipped() -> Iterator[Candidate]:
    from erniekit.cli.recipes_command import examples_folder, recipe_names

    yield from ((name.removeprefix("configs/"), "") for name in recipe_names(examples_folder()))


def _flags(name: str) -> Iterator[Candidate]:
    """Options in the command's usage lines, then keys as flags."""
    used = dict.fromkeys(flag for line in COMMANDS[name].usage for flag in _FLAG.findall(line))
    keys: dict[str, str] = {}
    if name not in KEYLESS:
        from erniekit.config.flat import KEYS

        keys = {f"--{k.name}": k.help for k in KEYS.values() if not k.not_yet}
    yield from ((flag, "") for flag in (*used, "--help") if flag not in keys)
    yield from keys.items()


def _keys(name: str, last: str) -> Iterator[Candidate]:
    """`key=`: those the command's own help shows while nothing is typed, then all that begin with it."""
    if name in KEYLESS:
        return
    from erniekit.config.flat import KEYS

    shown = COMMANDS[name].keys or tuple(k.name for k in KEYS.values() if k.basic)
    yield from ((f"{k.name}=", k.help) for k in KEYS.values() if not k.not_yet and (last or k.name in shown))


def _takes_value(name: str) -> bool:
    from erniekit.config.flat import KEYS, canonical

    k = KEYS.get(canonical(name))
    return k is not None and k.kind != "bool"


def _values(name: str, text: str, before: str) -> Iterator[Candidate]:
    from erniekit.config.flat import KEYS, canonical

    k = KEYS.get(canonical(name))
    if k is None:
        return
    if k.is_list and "," in text:  # the last item of a comma-separated list
        given, _, text = text.rpartition(",")
        before = f"{before}{given},"
    if k.item == "bool":
        yield from ((f"{before}{option}", "") for option in ("True", "False"))
    yield from (
        (f"{before}{option}", k.idle.get(option, ""))
        for option in dict.fromkeys((*k.choices, *(k.further or ())))
        if option
    )
    if k.path:
        yield from _paths(text, before, () if k.path in ("out", "model") else None)


def _paths(text: str, before: str, endings: Iterable[str] | None) -> Iterator[Candidate]:
    """Folders, and files with one of the endings; None takes every file. Hidden ones when their dot is typed."""
    folder, _, start = text.rpartition("/")
    place = f"{folder}/" if folder or text.startswith("/") else ""
    with os.scandir(os.path.expanduser(place) or ".") as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            if not entry.name.startswith(start) or (entry.name.startswith(".") and not start):
                continue
            if entry.is_dir():
                yield f"{before}{place}{entry.name}/", ""
            elif endings is None or entry.name.endswith(tuple(endings)):
                yield f"{before}{place}{entry.name}", ""
