"""Help made from the command table and the declared keys: short by default, everything on `--help all`.

Called by cli.main for `help`, `--help` and `COMMAND --help [all | SECTION | KEY]`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from erniekit.cli.commands import COMMANDS, KEYLESS, Command
from erniekit.cli.main import call
from erniekit.version import __version__

if TYPE_CHECKING:
    from erniekit.config.field import Key

WIDTH = 112


def help_command(args: list[str]) -> int:
    part = dict(COMMANDS[args[0]].parts).get(args[1]) if len(args) > 1 and args[0] in COMMANDS else None
    if part:  # it prints its own
        return call(part, ["--help"])
    print("\n".join(help_lines(args)))
    return 0


def help_lines(args: list[str]) -> list[str]:
    """The lines for `help [COMMAND] [all | SECTION | KEY]`; the keys are imported only when they are shown."""
    if not args:
        return _overview()
    command, *rest = args if args[0] in COMMANDS else ["train", *args]
    if not rest:
        return _of_command(command)
    from erniekit.config.sections import SECTIONS

    if rest[0] == "all":
        return _all_keys()
    if rest[0] not in SECTIONS:
        return _of_key(rest[0], command)
    from erniekit.config.flat import KEYS

    key = [*_of_key(rest[0], command), ""] if rest[0] in KEYS else []  # a key may be called as a section is
    return [*key, *_of_section(rest[0])]


def _overview() -> list[str]:
    out = [f"erniekit {__version__}: train, compress, export and serve ERNIE-4.5 and Llama class models", ""]
    last = ""
    for name, command in COMMANDS.items():
        group = command.group if command.group != last else ""
        last = command.group
        out.append(f"  {group:<6} {name:<10} {command.about}")
    return [
        *out,
        "",
        "the first five minutes",
        "  erniekit demo",
        "  erniekit train --model_name_or_path DIR --data my.jsonl --output_dir out max_steps=3",
        "  erniekit train examples/configs/ERNIE-4.5-0.3B/sft/run_sft_lora_8k.yaml",
        "  erniekit export examples/configs/ERNIE-4.5-0.3B/run_export.yaml",
        "  erniekit chat output/export",
        "",
        "A run is keys: in a YAML or JSON file, as --key value, as key=value, or all three; the last one wins.",
        "More: erniekit COMMAND --help, erniekit train --help all, erniekit train --help KEY",
    ]


def _of_command(name: str) -> list[str]:
    command = COMMANDS[name]
    out = [f"erniekit {name}: {command.about}", *(f"  {line}" for line in command.usage)]
    if name in KEYLESS:
        return out
    from erniekit.config.flat import KEYS

    basic = [k.name for k in KEYS.values() if k.basic and k.section not in ("export", "serve")]
    out += ["", *_table(_meant(KEYS[key], command) for key in command.keys or basic)]
    return [*out, "", "erniekit train --help all lists every key, --help KEY explains one."]


def _meant(k: Key, command: Command) -> Key:
    """The key as this command reads it."""
    text = dict(command.meant).get(k.name)
    return replace(k, default=None, help=text) if text else k


def _table(keys: Iterable[Key], whole: bool = False) -> list[str]:
    """The keys, the section named where it begins; one line each unless `whole` texts are wanted."""
    out, section = [], ""
    for k in keys:
        label = k.section if k.section != section else ""
        section = k.section
        start = f"{label:<11}{k.name:<28} {_default(k):<12} "
        about = ("(later) " if k.not_yet else "") + k.help
        if whole:
            out += textwrap.wrap(about, WIDTH, initial_indent=start, subsequent_indent=" " * len(start))
        else:
            out.append(start + _brief(about, WIDTH - len(start)))
    return out


def _default(k: Key) -> str:
    from erniekit.config.note import shown

    text = "-" if k.default is None or k.default == () else shown(k.default)
    return text if len(text) <= 12 else text[:9] + "..."


def _brief(text: str, width: int) -> str:
    """As many whole clauses as fit."""
    if len(text) <= width:
        return text
    cut = max(text.rfind(mark, 0, width) for mark in ("; ", ". ", " ("))
    return text[:cut] + "." if cut > 0 else text[: width - 3] + "..."


def _all_keys() -> list[str]:
    from erniekit.config.ignored_keys import IGNORED_KEYS
    from erniekit.config.sections import SECTIONS

    out = ["every key, its default and what it does", ""]
    for section in SECTIONS:
        out += [*_of_section(section), ""]
    dead = textwrap.wrap(", ".join(sorted(IGNORED_KEYS)), WIDTH - 2, initial_indent="  ", subsequent_indent="  ")
    return [*out, "accepted without effect; --help KEY gives the reason", *dead]


def _of_section(section: str) -> list[str]:
    from importlib import import_module

    from erniekit.config.flat import KEYS
    from erniekit.config.sections import SECTIONS

    about = (import_module(SECTIONS[section].__module__).__doc__ or "").splitlines()[0]
    return [about, *_table([k for k in KEYS.values() if k.section == section], whole=True)]


def _of_key(topic: str, command: str) -> list[str]:
    from erniekit.config.convert import expected
    from erniekit.config.flat import ALIASES, IGNORED_KEYS, KEYS, canonical, suggest
    from erniekit.config.sections import SECTIONS
    from erniekit.errors import ConfigError
    from erniekit.registry import nearest

    name = canonical(topic.lstrip("-"))
    if name in IGNORED_KEYS:
        return [f"{name}: accepted without effect", f"  {IGNORED_KEYS[name]}"]
    if name not in KEYS:
        near = suggest(name) or nearest(name, list(SECTIONS))
        fix = f"did you mean {' or '.join(near)}?" if near else "a command, a section, a key, or all"
        raise ConfigError(f"no help on {topic!r}", where="command line", fix=fix)
    k = _meant(KEYS[name], COMMANDS[command])
    out = [f"{name} ({k.section})", *textwrap.wrap(k.help, WIDTH - 2, initial_indent="  ", subsequent_indent="  ")]
    out += textwrap.wrap(f"  takes    {expected(k)}", WIDTH, subsequent_indent=" " * 11)
    out.append(f"  default  {_default(k)}")
    if also := [alias for alias, key in ALIASES.items() if key == name]:
        out.append(f"  also     {', '.join(also)}")
    for value, why in k.idle.items():
        out.append(f"  {value}: without effect; {why}")
    if k.not_yet:
        out.append(f"  later    read by {k.not_yet}, which this version does not have")
    return [*out, f"  write    {name}: VALUE in a file, --{name} VALUE, {name}=VALUE"]
