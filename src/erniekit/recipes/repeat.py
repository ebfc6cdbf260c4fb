"""What a run folder needs to repeat the run: recipe.yaml as it was given, with absolute paths, and the versions, code
and variables it ran with. Called by training.py, run_summary.py and dpo.py."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from erniekit.config import RunConfig
from erniekit.config.flat import DEFAULTS, KEYS
from erniekit.config.recipe_text import recipe_lines
from erniekit.config.run import stored_value
from erniekit.data.report import DataReport
from erniekit.files import own, settle
from erniekit.files.record import NotOurs
from erniekit.log import emit, without_secrets
from erniekit.printable import counted, plain
from erniekit.track import runfile
from erniekit.track.atomic import write_text
from erniekit.version import __version__

RECIPE = "recipe.yaml"
PACKAGES = ("transformers", "tokenizers", "safetensors", "sentencepiece", "numpy", "triton")
# Variables that change numbers, speed or devices; others may hold private values.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "WORLD_SIZE")
PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "ERNIEKIT_")
_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)  # in the name of a variable
_PLACES = ("one", "out", "several", "model")  # kinds of path keys whose values are paths and nothing else


def write_recipe(output: Path, cfg: RunConfig, command: Sequence[str]) -> None:
    """<output>/recipe.yaml: `erniekit train <output>/recipe.yaml output_dir=NEW` is the same run again."""
    text = "\n".join(recipe_of(cfg, command)) + "\n"
    write_unless_yours(output / RECIPE, text, "the keys of this run are in run.json")


def write_unless_yours(path: Path, text: str, instead: str) -> None:
    """A file of a run that it can do without. One of the user's of that name, kept where the run is, or a link stays;
    instead: what the user is then told."""
    try:
        own(path)
    except NotOurs:
        emit(f"note     {path} is yours and stays; {instead}")
        return
    write_text(path, text)
    settle(path)


def recipe_of(cfg: RunConfig, command: Sequence[str]) -> list[str]:
    typed = shlex.join(without_secrets(list(command))) or "erniekit.run"
    hidden = [name for name in KEYS if cfg.given(name) and stored_value(cfg[name]) != cfg[name]]
    derived = [f"#   {plain(str(note))}" for note in cfg.notes if note.changes]
    return [
        f"# Written by erniekit {__version__} on {datetime.now():%Y-%m-%d}. To repeat this run into a new folder:",
        f"#   erniekit train {RECIPE} output_dir=NEW",
        f"# It was started in {plain(os.getcwd())} as",
        f"#   {plain(typed, len(typed))}",
        *(f"# {name} is stored without its password or signature: give it again, {name}=URL" for name in hidden),
        *(["# Values that followed from these keys, from the model or the data (all of them: run.json):", *derived]),
        "",
        *recipe_lines(_given(cfg)),
    ]


def changed_data(cfg: RunConfig, reports: Sequence[DataReport]) -> list[str]:
    """A line for each data file that holds something else than it did when the run read it whose recipe this is."""
    lines = []
    for folder in (Path(file).parent for file in cfg.files if Path(file).name == RECIPE):
        before = _read_before(folder)
        for report in reports:
            then = before.get(str(Path(report.file).absolute()), {})
            if report.content and then.get("content") not in (None, "", report.content):
                was = f"{counted(int(then.get('rows') or 0), 'row')} ({then['content'][:8]})"
                now = f"{report.rows:,} ({report.content[:8]})"
                lines.append(f"{report.file} has changed since {folder} was trained on it: {was} then, {now} now")
    return lines


def _read_before(folder: Path) -> dict[str, dict[str, Any]]:
    """By their paths, what run.json has recorded of the data files; nothing of a run of an earlier version."""
    record = runfile.read(folder)
    try:
        data, started_in = record["data"], record["environment"]["folder"]
        return {str(Path(started_in, one["file"])): one for one in (*data["train"], *data["eval"])}
    except (KeyError, TypeError):
        return {}


def _given(cfg: RunConfig) -> dict[str, Any]:
    """What was given: values a rule has put in place of others follow again when the recipe is read."""
    out = {name: cfg[name] for name in KEYS if cfg.given(name)}
    for note in reversed(cfg.notes):
        if note.changes and note.key in KEYS and not cfg.given(note.key) and note.old != DEFAULTS[note.key]:
            out[note.key] = note.old
    return {name: stored_value(_lasting(name, value)) for name, value in out.items()}


def _lasting(name: str, value: Any) -> Any:
    """A path that means the same from every folder. A hub id, or what is not there, stays as it is."""
    if KEYS[name].path not in _PLACES:
        return value
    if isinstance(value, tuple):
        return tuple(_absolute(name, one) for one in value)
    return _absolute(name, value) if isinstance(value, str) else value


def _absolute(name: str, text: str) -> str:
    path = Path(text).expanduser()
    return str(path.absolute()) if KEYS[name].path == "out" or path.exists() else text


def environment(device: str) -> dict[str, Any]:
    """Versions, code and variables, for run.json."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device,
        "system": platform.platform(),
        "host": platform.node(),
        "folder": os.getcwd(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "commits": _commits(),
        "variables": variables(os.environ),
    }


def variables(env: Mapping[str, str]) -> dict[str, str]:
    wanted = (name for name in sorted(env) if name in VARIABLES or name.startswith(PREFIXES))
    return {name: env[name] for name in wanted if not _SECRET.search(name)}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commits() -> dict[str, str]:
    """Of erniekit's checkout and of the folder the run was started in, where they are in one."""
    own, here = _own_checkout(), checkout_of(Path.cwd())
    if here is not None and own is not None and here.top == own.top:
        here = own
    places = {"erniekit": own, "started in": here}
    return {name: place.commit for name, place in places.items() if place is not None}


class Checkout:
    def __init__(self, top: Path, head: str) -> None:
        self.top, self.head = top, head

    @cached_property
    def commit(self) -> str:
        """With .dirty where tracked files differ from it. In a new clone git reads all files again to see that."""
        git = ["git", "-C", str(self.top), "diff", "--quiet", "HEAD", "--"]
        try:
            changed = subprocess.run(git, capture_output=True, timeout=5).returncode
        except (OSError, subprocess.SubprocessError):
            changed = 1
        return self.head + (".dirty" if changed else "")


@cache
def _own_checkout() -> Checkout | None:
    """Once: the code that runs is that of the process's start."""
    return checkout_of(Path(__file__).resolve().parent)


def checkout_of(folder: Path) -> Checkout | None:
    """The one around a folder; None where there is none, or no git."""
    git = ["git", "-C", str(folder), "rev-parse", "HEAD", "--show-toplevel"]
    try:
        found = subprocess.run(git, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    head, _, top = found.stdout.rstrip("\n").partition("\n")
    return Checkout(Path(top), head)
