"""`erniekit migrate FILE`: a Paddle launch script or an old recipe becomes ours, and every changed line is reported.

Called by cli.main. Runs nothing of the script, overwrites nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from erniekit.cli.config_command import purpose
from erniekit.config import RunConfig, load, not_yet_supported
from erniekit.config.flat import DEGREES
from erniekit.config.migrate import KINDS, MigratedRun, Remark, migrate_file
from erniekit.config.note import shown
from erniekit.config.recipe_text import recipe_lines
from erniekit.errors import ConfigError
from erniekit.log import paint
from erniekit.printable import counted

USAGE = "erniekit migrate FILE [--output NEW.yaml] [--print]"


def migrate_command(args: list[str]) -> int:
    file, output, only_print = _options(args)
    runs = migrate_file(file)
    names = _names(file, output, len(runs))
    checked = [_checked(run) for run in runs]
    texts = [_recipe(run, cfg, file, name) for run, cfg, name in zip(runs, checked, names, strict=True)]
    if not only_print:
        _refuse_existing(names)
    for run, cfg, name, text in zip(runs, checked, names, texts, strict=True):
        if only_print:
            print(text, end="")
            continue
        _write(name, text)
        print("\n".join(_report(run, cfg, file, name)))
    return 0


def _options(args: list[str]) -> tuple[str, str, bool]:
    arguments, output = [argument for argument in args if argument != "--print"], ""
    for at, argument in enumerate(arguments):
        if argument.startswith(("--output", "output=")):
            _, equals, output = argument.partition("=")
            taken = 1 if equals else 2
            output = output if equals else "".join(arguments[at + 1 : at + 2])
            if not output.endswith((".yaml", ".yml")):
                raise ConfigError("--output needs the name of a .yaml file", where="command line", fix=USAGE)
            arguments = arguments[:at] + arguments[at + taken :]
            break
    if len(arguments) != 1 or arguments[0].startswith("-"):
        what = "no file given" if not arguments else f"cannot interpret {arguments[-1]!r}"
        raise ConfigError(what, where="command line", fix=USAGE)
    return arguments[0], output, "--print" in args


def _names(file: str, output: str, count: int) -> list[str]:
    """run.sh -> run.yaml in the working folder; a recipe keeps its name with -erniekit behind it."""
    stem = Path(file).stem + ("-erniekit" if file.endswith((".yaml", ".yml", ".json")) else "")
    first = output or f"{stem}.yaml"
    if count == 1:
        return [first]
    root, end = os.path.splitext(first)
    return [f"{root}-{i + 1}{end}" for i in range(count)]


def _refuse_existing(names: list[str]) -> None:
    for name in names:
        if os.path.lexists(name):
            raise ConfigError(f"{name} is there already", where=name, fix="--output OTHER.yaml, or --print to see it")


def _write(name: str, text: str) -> None:
    try:
        with open(name, "x", encoding="utf-8") as f:  # x: also against one that appeared just now
            f.write(text)
    except OSError as e:
        why = (e.strerror or "cannot be written").lower()
        raise ConfigError(f"cannot write {name}: {why}", where=name, fix="--output OTHER.yaml") from None


def _checked(run: MigratedRun) -> RunConfig:
    """The run as it resolves here; what is wrong with it names the lines it came from."""
    try:
        command = run.command or purpose(load([], "config", run.values))
        run.command = command
        return load([], command, run.values)
    except ConfigError as error:
        names = error.what.replace(",", " ").replace(":", " ").split()
        places = dict.fromkeys(run.places[name] for name in names if name in run.places)
        raise ConfigError(error.what, where=" and ".join(places) or run.place, fix=error.fix) from None


# ---- the recipe


def _recipe(run: MigratedRun, cfg: RunConfig, file: str, name: str) -> str:
    lines = [f"# From {os.path.basename(file)}, by erniekit migrate. To start it:"]
    lines += [f"#   {line}" for line in run.machines.setup()]
    for machine, line in run.machines.lines(cfg.command, name):
        lines.append(f"#   {line}" + (f"    # {machine}" if machine else ""))
    return "\n".join([*lines, *recipe_lines(run.values)]) + "\n"


# ---- the report


def _report(run: MigratedRun, cfg: RunConfig, file: str, name: str) -> Iterator[str]:
    kind = (
        f" ({cfg.train.stage}, {cfg.lora.fine_tuning}, {cfg.precision.compute_type})" if cfg.command == "train" else ""
    )
    yield paint(f"{run.place}: {run.what}{kind}", "bold")
    yield f"{'kept':<15}{counted(run.kept, 'key as it is', 'keys as they are')}"
    for kind_of_remark in KINDS:
        for remark in sorted((r for r in run.remarks if r.kind == kind_of_remark), key=_line):
            yield f"{remark.kind:<15}{_place(remark.place, file):<10}{remark.what}: {remark.why}"
    for note in (n for n in cfg.notes if not n.quiet):
        yield f"{'follows':<15}{note}"
    for item in not_yet_supported(cfg):
        where = _place(run.places.get(item.key, ""), file)
        yield f"{'not yet':<15}{where:<10}{item.key} {shown(item.value)}: {item.what}; {item.today}"
    yield from _layout(run, cfg)
    yield f"{'wrote':<15}{name} ({counted(len(run.values), 'key')})"
    for line in run.machines.setup():
        yield f"{'first':<15}{line}"
    for machine, line in run.machines.lines(cfg.command, name):
        yield f"{'start':<15}{line}" + (f"    # {machine}" if machine else "")
    if cfg.command == "train":
        yield f"{'see':<15}erniekit config {name}; compat=erniekit repeats ERNIEKit's numbers step for step"


def _line(remark: Remark) -> tuple[str, int]:
    path, _, line = remark.place.rpartition(":")
    return path, int(line) if line.isdecimal() else 0


def _place(place: str, file: str) -> str:
    """`line 12` of the file that is migrated; others by their name."""
    path, _, line = place.rpartition(":")
    return f"line {line}" if path == file else f"{os.path.basename(path)}:{line} " if path else ""


def _layout(run: MigratedRun, cfg: RunConfig) -> Iterator[str]:
    """Whether the degrees fit the processes that the launch starts."""
    ranks = run.machines.ranks
    degrees = {key.removesuffix("_parallel_degree"): cfg[key] for key in DEGREES if key in run.values and cfg[key] > 1}
    degrees = {name: n for name, n in degrees.items() if name in ("tensor", "pipeline", "sharding", "context", "data")}
    if not ranks or cfg.command != "train":
        return
    product = 1
    for n in degrees.values():
        product *= n
    text = " x ".join(f"{name} {n}" for name, n in degrees.items()) or "no degree"
    fits = "" if ranks % product == 0 else ": they do not fit, and the run will refuse them"
    yield f"{'layout':<15}{text} = {product}; the launch starts {counted(ranks, 'rank')}{fits}"
