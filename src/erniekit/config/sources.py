"""YAML, JSON, --flags, key=value and Python values, in any mix -> one flat set with the origin of each value.

Called by config.load. The last value wins: a file first, then the command line from left to right.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from erniekit.config import paddleformers
from erniekit.config.convert import FALSE, TRUE, convert
from erniekit.config.extends import BASE, with_bases
from erniekit.config.files import FileEntry, parse_value
from erniekit.config.flat import KEYS, canonical, is_known, suggest
from erniekit.config.ignored_keys import IGNORED_KEYS
from erniekit.config.note import shown
from erniekit.errors import ConfigError

SECTIONED = ("env", "model_args", "trainer_args")  # of the pre-training YAML
YAML, JSON = (".yaml", ".yml"), (".json",)

OWN_FILES = ("eval_tasks",)  # their first value may be a .yaml of their own: after `--tasks` it is a task, not a recipe

BARE = "command line"  # origin of a positional argument
# What a positional argument means after these commands.
POSITIONAL = {
    "chat": "model_name_or_path",
    "eval": "model_name_or_path",
    "server": "model_name_or_path",
    "data": "train_dataset_path",
    "export": "output_dir",
    "quantize": "model_name_or_path",
    "split": "output_dir",
}


@dataclass(frozen=True)
class Given:
    value: Any
    origin: str  # `recipe.yaml:12`, `flag --x`, `key=value`, `argument`
    order: int  # later wins
    in_file: bool = False
    written: str = ""  # the name it was given under: the key itself, or an alias


@dataclass
class Sources:
    """What was given, by declared key; `ignored` holds the keys that are accepted without effect."""

    given: dict[str, Given] = field(default_factory=dict)
    ignored: dict[str, Given] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    sectioned: bool = False  # a pre-training YAML was read
    unknown: list[tuple[str, str]] = field(default_factory=list)
    _order: int = 0

    def put(self, name: str, value: Any, origin: str, *, in_file: bool = False) -> None:
        """Record one value under its declared name; unknown names are collected, to be reported together."""
        name, _, inner = name.partition(".")
        if name in SECTIONED and inner:  # trainer_args.max_steps=3
            name, _, inner = inner.partition(".")
        written = name.replace("-", "_")
        name, value = paddleformers.translated(written, value)
        name = canonical(name)
        self._order += 1
        if name in KEYS:
            if inner:
                value = parse_value(value, origin) if isinstance(value, str) else value
                for part in reversed(inner.split(".")):
                    value = {part: value}
            if name == "output_dir" and not in_file and isinstance(value, str) and not value.strip():
                raise _empty(written, origin)
            value = convert(KEYS[name], value, origin)
            if isinstance(value, dict) and name in self.given:  # a later argument changes some of it
                value = _merged(self.given[name].value or {}, value)
            given = Given(value, origin, self._order, in_file, written)
            if name in self.given:
                _refuse_two_names(name, self.given[name], given)
            self.given[name] = given
        elif name in IGNORED_KEYS or (name in paddleformers.NO_COUNTERPART and paddleformers.is_off(value)):
            self.ignored[name] = Given(value, origin, self._order, in_file)
        else:
            self.unknown.append((name, origin))


def collect(
    args: list[str], command: str, overrides: Mapping[str, Any] | None = None, *, standalone: bool = False
) -> Sources:
    """Everything given after the command, then the Python values of `overrides`. standalone: a recipe has no base."""
    out = Sources()
    items = [(name, value, _origin(args[at], name)) for name, value, at in arguments_by_key(args)]
    recipes = YAML if command == "data" else YAML + JSON  # a .json after `data` is a dataset
    for name, value, _ in items:
        if not name and value.endswith(recipes):
            _read_into(out, value, standalone)
    for name, value, origin in items:
        if name:
            out.put(name, value, origin)
    for argument in (value for name, value, _ in items if not name and value not in out.files):
        _put_bare(out, argument, command)
    for name, value in (overrides or {}).items():
        out.put(name, value, "argument")
    if out.unknown:
        raise _unknown_keys(out.unknown)
    return out


# ---- files


def _read_into(out: Sources, name: str, standalone: bool) -> None:
    for file, entries in with_bases(name, standalone=standalone):
        _read_entries(out, file, entries)


def _read_entries(out: Sources, name: str, entries: Mapping[str, FileEntry]) -> None:
    out.files.append(name)
    if any(s in entries and isinstance(entries[s].value, dict) for s in SECTIONED[1:]):
        out.sectioned = True
    for key, entry in entries.items():
        if key in SECTIONED[1:] and isinstance(entry.value, dict):
            for inner, inner_entry in entry.value.items():
                _put_entry(out, inner, inner_entry, name)
        else:
            _put_entry(out, key, entry, name)


def _put_entry(out: Sources, key: str, entry: FileEntry, name: str) -> None:
    value = entry.plain if isinstance(entry.value, dict) else entry.given
    out.put(key, value, f"{name}:{entry.line}", in_file=True)


def _refuse_two_names(name: str, one: Given, other: Given) -> None:
    """Two names of one key at one level, such as one file: neither is the later one."""
    apart = one.written != other.written and one.value != other.value
    if apart and _level(one) == _level(other):
        raise ConfigError(
            f"{one.written} and {other.written} are both {name}, with {shown(one.value)} and {shown(other.value)}",
            where=f"{one.origin} and {other.origin}",
            fix=f"keep one of them: {name}: VALUE",
        )


def _level(given: Given) -> str:
    return given.origin.rpartition(":")[0] if given.in_file else "typed"


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(old)
    for name, value in new.items():
        deeper = isinstance(value, dict) and isinstance(out.get(name), dict)
        out[name] = _merged(out[name], value) if deeper else value
    return out


# ---- arguments of a command line

# Of ERNIE's pre-training script: recipes follow the first two, key=value the third, as everywhere here.
BEFORE = ("--config", "--configs", "--kwargs")


def arguments_by_key(arguments: list[str]) -> Iterator[tuple[str, Any, int]]:
    """(key, value, number of the argument) of every flag and key=value; a positional argument has no key."""
    at = 0
    while at < len(arguments):
        argument, first = arguments[at], at
        at += 1
        if argument in BEFORE:
            continue
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            if equals:
                yield name, value, first
            else:
                taken, at = _take(arguments, at, name)
                yield name, taken, first
        elif _is_assignment(argument):
            name, _, text = argument.partition("=")
            structured = text.startswith(("[", "{", '"', "'"))
            yield name, parse_value(text, f"key=value {name}") if structured else text, first
        else:
            yield "", argument, first


def _origin(argument: str, name: str) -> str:
    return (f"flag --{name}" if argument.startswith("--") else "key=value") if name else BARE


def _is_assignment(argument: str) -> bool:
    left, equals, _ = argument.partition("=")
    return bool(equals) and left.replace(".", "_").replace("-", "_").isidentifier()


def _names_a_key(assignment: str) -> bool:
    return is_known(assignment.partition("=")[0])


def _take(arguments: list[str], at: int, name: str) -> tuple[Any, int]:
    """The value of flag `name` whose words start at `at`, and where the next thing starts."""
    k = KEYS.get(canonical(name))
    follows = arguments[at] if at < len(arguments) else None
    if k is not None and k.kind == "bool":
        if follows is not None and follows.lower() in TRUE + FALSE:
            return follows, at + 1
        return True, at
    if k is None or k.is_list:  # a list, or a key without effect: all values up to the next flag, key or recipe
        own = k is not None and k.name in OWN_FILES
        names = k.names if k is not None else ()
        # name=DIR may be what a list holds: at its beginning, where no key has that name, and after such a one.
        pairs = k is not None and follows is not None and _is_assignment(follows) and not _names_a_key(follows)
        end = at
        while end < len(arguments) and not arguments[end].startswith("--"):
            named = arguments[end].partition("=")[0] in names
            if _is_assignment(arguments[end]) and not named and (not pairs or _names_a_key(arguments[end])):
                break
            if arguments[end].endswith(YAML) and not (own and end == at):
                break
            end += 1
        if end > at or k is None:
            return ",".join(arguments[at:end]) or True, end
    elif follows is not None and not follows.startswith("--"):
        return follows, at + 1
    if k.path == "named" and follows is not None and _is_assignment(follows):
        fix = f"{follows.partition('=')[0]} is a key, too: --{name}={follows} gives it to --{name}"
        raise ConfigError(f"--{name} needs a value", where=f"flag --{name}", fix=fix)
    raise ConfigError(f"--{name} needs a value", where=f"flag --{name}", fix=k.help)


def _put_bare(out: Sources, text: str, command: str) -> None:
    if text.endswith(".py"):
        raise ConfigError(f"{text} is a program", where=text, fix="give a .yaml or .json file")
    if command not in POSITIONAL:
        fix = f"did you mean --{text}?" if is_known(text) else "give a .yaml or .json file, --key value or key=value"
        if os.path.isfile(text):
            fix = f"{fix}; give a dataset with --data"
        raise ConfigError(f"cannot interpret {text!r}", where="command line", fix=fix)
    name = _meant(out, command)
    before = out.given.get(name)
    if before is not None and not before.in_file:
        if not (KEYS[name].is_list and before.origin == BARE):
            raise _two_meanings(name, text, before)
        text = ",".join([*before.value, text])
    out.put(name, text, BARE)


def _meant(out: Sources, command: str) -> str:
    """The key of a positional argument. After lora_path, export takes it for the base, or for the destination where
    model_name_or_path names the base."""
    typed = {name for name, given in out.given.items() if not given.in_file and given.origin != BARE}
    if command == "export" and "lora_path" in typed and "model_name_or_path" not in typed:
        return "model_name_or_path"
    return POSITIONAL[command]


def _two_meanings(name: str, argument: str, before: Given) -> ConfigError:
    fix = {
        "model_name_or_path": "one of them; an adapter and its base: lora_path=ADAPTER model_name_or_path=BASE",
        "output_dir": "one of them; a base and adapters to merge: BASE lora_path=ADAPTER output_dir=DEST",
    }
    return ConfigError(
        f"{argument} and {before.value if isinstance(before.value, str) else ', '.join(before.value)} both name {name}",
        where=f"command line and {before.origin}" if before.origin != BARE else "command line",
        fix=fix.get(name, f"give all of them behind {name}, or none"),
    )


def _empty(name: str, origin: str) -> ConfigError:
    """Results would go to ./output, which a user whose shell variable is not set does not expect."""
    fix = f"name the folder: {name}=DIR; if a shell variable was to name it, it is not set"
    return ConfigError(f"the value of {name} is empty", where=origin, fix=fix)


def _unknown_keys(unknown: list[tuple[str, str]]) -> ConfigError:
    hints = []
    for name, _ in unknown:
        if name in paddleformers.NO_COUNTERPART:
            hints.append(f"{name} of PaddleFormers has no counterpart: {paddleformers.NO_COUNTERPART[name]}")
            continue
        if name == BASE:
            hints.append("base is a line of a recipe: name both files instead, the later one wins")
            continue
        near = suggest(name)
        hint = f"did you mean {' or '.join(near)}?" if near else "no similar key"
        hints.append(f"{name}: {hint}" if len(unknown) > 1 else hint)
    names = ", ".join(repr(name) for name, _ in unknown)
    return ConfigError(
        f"unknown key{'s' if len(unknown) > 1 else ''} {names}",
        where=", ".join(origin for _, origin in unknown),
        fix="; ".join(hints) + " (all keys: erniekit train --help all)",
    )
