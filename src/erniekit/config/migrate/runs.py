"""A file -> the runs in it, each as our keys, a launch line for every machine, and a remark on every line that changed.

Called by `erniekit migrate`. Reads the file and the recipes it names; runs nothing, writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from erniekit.config.extends import with_bases
from erniekit.config.files import FileEntry
from erniekit.config.migrate import environment
from erniekit.config.migrate.keys import Remark, WrittenKey, migrated_keys
from erniekit.config.migrate.launcher import Launch, launch_of
from erniekit.config.migrate.machines import Machines
from erniekit.config.migrate.secrets import HIDDEN, Secrets, is_secret
from erniekit.config.migrate.shell import ShellWord, Statement, read_script
from erniekit.config.sources import JSON, SECTIONED, YAML, arguments_by_key
from erniekit.errors import ConfigError
from erniekit.files import refuse_special

MAX_BYTES = 200_000  # a launch script is a few kilobytes
# Commands of a script that have nothing to do with the run, and why each is left out.
OTHER_PROGRAMS = {
    "rm": "nothing is deleted for you: a run resumes in its output_dir or refuses a folder that is not its own",
    "mkdir": "folders are made as needed",
    "tee": "the log is in output_dir and log_dir",
    "wget": "a download; fetch the file yourself",
    "pip": "an installation",
    "python": "starts no training",
    "cd": "paths of a recipe start where erniekit is started",
}


@dataclass
class MigratedRun:
    """One run: its values in our names, and how to start it."""

    place: str  # file:line of the command, or the file
    what: str  # a description of the command
    command: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)
    kept: int = 0
    machines: Machines = field(default_factory=Machines)


def migrate_file(name: str) -> list[MigratedRun]:
    """Every run that a script starts, or the one of a recipe. No secret is left in what it returns or raises."""
    secrets = Secrets()
    try:
        runs = _migrated(name, secrets)
    except ConfigError as error:
        raise ConfigError(secrets.hide(error.what), where=secrets.hide(error.where), fix=error.fix) from None
    for run in runs:
        run.what = secrets.hide(run.what)
        run.remarks = [replace(r, what=secrets.hide(r.what), why=secrets.hide(r.why)) for r in run.remarks]
        run.machines.before = [secrets.hide(line) for line in run.machines.before]
    return runs


def _migrated(name: str, secrets: Secrets) -> list[MigratedRun]:
    if name.endswith(YAML + JSON):
        keys = migrated_keys(_without_secrets(_recipe_entries(name), secrets))
        run = MigratedRun(name, "a recipe", "", keys.values, keys.places, keys.remarks, keys.kept)
        run.machines.take_keys(keys.launch)
        return [run]
    return _of_script(_text(name), name, secrets)


def _without_secrets(entries: Iterable[WrittenKey], secrets: Secrets) -> list[WrittenKey]:
    """Each with its secret marked. All are read first: one key may hold what another calls a secret."""
    found = list(entries)
    for entry in found:
        secrets.add(entry.name, entry.value)
    return [replace(entry, secret=is_secret(entry.name) or secrets.in_value(entry.value)) for entry in found]


def _text(name: str) -> str:
    path = Path(name)
    refuse_special(path, ConfigError)
    try:
        with path.open("rb") as f:
            raw = f.read(MAX_BYTES + 1)
    except OSError as e:
        why = "is a folder" if path.is_dir() else (e.strerror or "cannot be read").lower()
        fix = "give a launch script (.sh), or a .yaml or .json recipe"
        raise ConfigError(f"cannot read {name}: {why}", where=name, fix=fix) from None
    if len(raw) > MAX_BYTES or b"\0" in raw:
        raise ConfigError(f"{name} is not a script", where=name, fix="give a launch script (.sh), or a .yaml or .json")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{name} is not UTF-8 text (byte {e.start})", where=name, fix="save it as UTF-8") from None


def _recipe_entries(name: str) -> Iterator[WrittenKey]:
    for file, entries in with_bases(name):
        for key, entry in entries.items():
            nested = key in SECTIONED and isinstance(entry.value, dict)
            for inner, value in entry.value.items() if nested else [(key, entry)]:
                yield WrittenKey(inner, _plain(value), f"{file}:{value.line}", in_file=True)


def _plain(entry: FileEntry) -> Any:
    return entry.plain if isinstance(entry.value, dict) else entry.given


# ---- scripts


def _of_script(text: str, name: str, secrets: Secrets) -> list[MigratedRun]:
    general: list[Remark] = []
    runs: list[MigratedRun] = []
    exported: dict[str, ShellWord] = {}
    before: list[str] = []  # lines to type before the launch
    statements = list(read_script(text, name))
    for statement in statements:
        secrets.add_arguments([word.text for word in statement.words])
        for variable, word in statement.assigned:
            secrets.add(variable, word.text)
    for statement in statements:
        place = f"{name}:{statement.line}"
        words = list(statement.words)
        if words and words[0].text == "export":
            exported |= dict(statement.assigned)
        elif words and words[0].text == "unset":
            for word in words[1:]:
                general.append(Remark("dropped", f"{name}:{word.line}", f"unset {word.text}", "nothing here reads it"))
        elif words and words[0].text in ("source", "."):
            before.append(" ".join(w.text for w in words))
        elif words and not statement.piped and (launch := launch_of(words)) is not None:
            env = {**exported, **dict(statement.assigned)}
            runs.append(_run(launch, env, name, before, secrets))
        elif words:
            general += _left_out(statement, place, secrets)
    if not runs:
        raise ConfigError(
            f"{name} starts no known training program",
            where=name,
            fix="looked for: python -m paddle.distributed.launch SCRIPT.py, erniekit train, paddleformers-cli train",
        )
    runs[0].remarks[:0] = general
    return runs


def _left_out(statement: Statement, place: str, secrets: Secrets) -> Iterator[Remark]:
    program = statement.words[0].text.rpartition("/")[2]
    text = secrets.hide(" ".join(w.text for w in statement.words))  # before it is cut: half a secret is one too
    text = text if len(text) <= 60 else text[:57] + "..."
    if program in ("bash", "sh") and len(statement.words) > 1:
        yield Remark("no counterpart", place, text, "another script; give it to erniekit migrate as well")
    elif program not in ("set", "echo", "fi", "done", "["):
        yield Remark("dropped", place, text, OTHER_PROGRAMS.get(program, "no part of the run"))


def _run(launch: Launch, env: dict[str, ShellWord], name: str, before: Sequence[str], secrets: Secrets) -> MigratedRun:
    what = f"erniekit {launch.command}"
    if launch.program:
        what = f"paddle.distributed.launch of {launch.program}" if launch.by_paddle else launch.program
    run = MigratedRun(f"{name}:{launch.line}", what, launch.command)
    run.machines.before = list(before)
    entries = _without_secrets(_entries(launch, name), secrets)
    keys = migrated_keys(entries, launch.stage, from_script=launch.stage in ("SFT", "DPO"))
    run.values, run.places, run.remarks, run.kept = keys.values, keys.places, keys.remarks, keys.kept
    if launch.program and not launch.stage:
        run.remarks.append(Remark("added", "", "stage: SFT", f"{launch.program} is not known: taken for SFT"))
    for option, word, why in launch.dropped:
        run.remarks.append(Remark("dropped", f"{name}:{word.line}", _option(option, word.text), why))
    run.remarks[:0] = list(_environment(run, env, name, secrets))
    run.machines.take_keys(keys.launch)
    run.machines.take_options(launch)
    joined = next((word for variable, word in env.items() if variable.startswith("FLAGCX_")), None)
    if joined is not None:
        why = "it joins cards of two vendors: `device` is each machine's own, `islands: [gpu:8, ...]` names both"
        run.remarks.append(Remark("mind", f"{name}:{joined.line}", "FlagCX", why))
    return run


def _option(name: str, value: str) -> str:
    return f"--{name} {HIDDEN if is_secret(name) else value}".strip()


def _environment(run: MigratedRun, env: dict[str, ShellWord], name: str, secrets: Secrets) -> Iterator[Remark]:
    for variable, word in env.items():
        place = f"{name}:{word.line}"
        kept, why = environment.decide(variable)
        if variable in environment.LAUNCH:
            run.machines.take_variable(environment.LAUNCH[variable], word)
        elif is_secret(variable) or secrets.in_value(word.text):
            yield Remark("dropped", place, variable, "a secret; set it in the environment")
        elif kept:
            run.machines.exported[variable] = word
        else:
            yield Remark("dropped", place, f"{variable}={word.text}", why)
        if variable == "PADDLE_XCCL_BACKEND" and "device" not in run.values and not word.open:
            run.values["device"] = word.text
            run.places["device"] = place
            yield Remark("added", place, f"device: {word.text}", f"from {variable}")


def _entries(launch: Launch, name: str) -> Iterator[WrittenKey]:
    """The keys of the recipes a command names, then those of its own arguments: the last one wins, as there."""
    words = [w.text for w in launch.words]
    items = list(arguments_by_key(words))
    for key, value, at in items:
        if not key and str(value).endswith(YAML + JSON):
            yield from _recipe_entries(_found(str(value), f"{name}:{launch.words[at].line}", name))
    for key, value, at in items:
        word = launch.words[at]
        if key:
            taken = launch.words[at : _next(items, at, len(words))]
            yield WrittenKey(key, value, f"{name}:{word.line}", open=any(w.open for w in taken))
        elif not str(value).endswith(YAML + JSON):
            raise ConfigError(
                f"cannot interpret {value!r}", where=f"{name}:{word.line}", fix="expected --key value or key=value"
            )


def _next(items: Sequence[tuple[str, Any, int]], at: int, end: int) -> int:
    return min((other for _, _, other in items if other > at), default=end)


def _found(path: str, place: str, script: str) -> str:
    """A recipe that a script names: where the script runs, or next to the script."""
    for folder in ("", os.path.dirname(script)):
        full = os.path.normpath(os.path.join(folder, path))
        if os.path.isfile(full):
            return full
    raise ConfigError(
        f"cannot read {path}, which the script names", where=place, fix="start erniekit migrate where the script starts"
    )
