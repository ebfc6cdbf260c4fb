"""Whether a run may write into a folder: checked before any work, by the command line, the page and the ranks.

A run takes an empty folder or goes on in one of its own; inputs may not lie in it, nor it in them.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from erniekit.errors import ConfigError
from erniekit.files.links import file_inside
from erniekit.files.record import RECORD, NotOurs, OwnedFiles, RecordEntry, has_digest, some
from erniekit.files.tokenizer_names import TOKENIZER_FILES
from erniekit.files.unwritable import way_out

RUN = "run"
ROWS = "rows"  # use of a file of rows that a Python session gave: written before the run and only read by it
# What a run writes besides its checkpoints, and the files of a final model.
RUN_FILES = (
    "run.json", "metrics.jsonl", "report.html", "train_results.json", "eval_results.json", "all_results.json",
    "trainer_state.json", "bad_rows.jsonl", "bad_eval_rows.jsonl", "bad_text_rows.jsonl", "wandb_run_id",
    "swanlab_run_id", "mlflow_run_id",
)  # fmt: skip
MODEL_FILES = (
    "config.json", "generation_config.json", "preprocessor_config.json", "model*.safetensors*",
    "adapter_config.json", "adapter_model*.safetensors*", "lora_config.json", "peft_model*.safetensors*",
    "base_model.json", "score_head.json", "vision_proof.json",
    "probe.safetensors", *TOKENIZER_FILES,
)  # fmt: skip
# A folder with nothing but these counts as empty: what a shell, a scheduler or a file system puts there first.
INCIDENTAL = (".*", "lost+found", "*.log", "*.out", "*.err", "nohup.out")
MANIFEST = "MANIFEST.json"


def check_output(output: str | Path, folders: Mapping[str, str], files: Mapping[str, Sequence[str]]) -> None:
    """Raises where a run must not write into `output`; changes nothing. `folders` and `files`: the inputs by key."""
    output = Path(output).expanduser()
    if os.path.lexists(output) and not output.is_dir():
        raise ConfigError(
            f"{output} is not a folder",
            where="output_dir",
            fix="choose another output_dir; a folder that does not exist is created",
        )
    check_name(output)
    for key, path in folders.items():
        _refuse_overlap(output, key, Path(path).expanduser())
    if not output.is_dir():
        return
    owned = OwnedFiles(output)
    if owned.purpose() != RUN and not is_unrecorded_run(output):
        recorded = owned.entries()
        foreign = sorted(n for n in _names(output) if not (_is_incidental(output / n) or owned.is_ours(n, recorded)))
        if foreign:
            raise NotOurs(
                f"output_dir is neither empty nor a run: it holds {some(foreign)}",
                where=f"output_dir: {output}",
                fix="choose an empty or new folder: nothing that erniekit did not write is ever replaced",
            )
        return
    entries = owned.entries() if owned.exists else _adoptable(output)
    for key, paths in files.items():
        for path in paths:
            _refuse_own_file(output, key, Path(path).expanduser(), entries)
    names = [name for name in _names(output) if name in RUN_FILES or _matches(name, MODEL_FILES)]
    if blocked := sorted(name for name in names if not owned.is_ours(name, entries)):
        raise NotOurs(
            f"output_dir holds {some(blocked)}, not as this run wrote it: what is there would be replaced",
            where=f"output_dir: {output}",
            fix="move it away, or choose another output_dir",
        )


def check_name(output: Path) -> None:
    """safetensors opens no path with other bytes: what was written there could not be read again."""
    try:
        str(output).encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(
            "the name of output_dir holds bytes that are not UTF-8",
            where=f"output_dir: {output}",
            fix="choose a path of letters that UTF-8 has",
        ) from None


def open_output(output: str | Path, folders: Mapping[str, str], files: Mapping[str, Sequence[str]]) -> OwnedFiles:
    """The checked folder with its record, created where missing."""
    check_output(output, folders, files)
    output = Path(output).expanduser()
    owned = OwnedFiles(output)
    try:
        if not owned.exists and is_unrecorded_run(output):
            owned.open(RUN).settle(*sorted(_adoptable(output)))
        return owned.open(RUN)
    except OSError as error:
        raise ConfigError(
            f"output_dir cannot be written: {error.strerror or error}",
            where=f"output_dir: {output}",
            fix=f"{way_out(error)}, or choose another output_dir",
        ) from error


def is_unrecorded_run(output: Path) -> bool:
    """A run of a version that kept no record: run.json as such a version wrote it."""
    if OwnedFiles(output).exists:
        return False
    record = _json(output / "run.json")
    return isinstance(record.get("format"), int) and {"version", "command", "status"} <= record.keys()


def _adoptable(output: Path) -> dict[str, RecordEntry]:
    """Files of an unrecorded run: those with a run's names, and model files equal to a checkpoint's."""
    plain = [name for name in _names(output) if (output / name).is_file() and not (output / name).is_symlink()]
    found = {name: RecordEntry() for name in plain if name in RUN_FILES}
    saved: dict[str, set[str]] = {}
    for folder in output.glob("checkpoint-*"):
        listed = _json(folder / MANIFEST).get("files")
        for name, record in (listed if isinstance(listed, dict) else {}).items():
            saved.setdefault(name, set()).add(str(record.get("sha256") if isinstance(record, dict) else ""))
    found |= {name: RecordEntry() for name in plain if name in saved and has_digest(output / name, saved[name])}
    return found


def _refuse_overlap(output: Path, key: str, path: Path) -> None:
    if not path.is_dir():  # a hub id, or a mistake that is reported where it is read
        return
    ours, theirs = (Path(os.path.realpath(p)) for p in (output, path))
    if ours == theirs:
        relation = f"is the folder of {key}"
    elif theirs.is_relative_to(ours):
        relation = f"holds the folder of {key}"
    elif ours.is_relative_to(theirs):
        relation = f"lies inside the folder of {key}"
    elif (link := file_inside(path, output)) is not None:
        relation = f"holds the file that {link.name} in the folder of {key} is a link to"
    else:
        return
    raise ConfigError(
        f"output_dir {relation}: results would be mixed with what they are made from",
        where=f"output_dir: {output}, {key}: {path}",
        fix="choose an output_dir next to it",
    )


def _refuse_own_file(output: Path, key: str, path: Path, entries: Mapping[str, RecordEntry]) -> None:
    """A dataset that is one of the run's own files, such as its list of bad rows, would be rewritten as it is read."""
    real, ours = Path(os.path.realpath(path)), Path(os.path.realpath(output))
    entry = entries.get(real.relative_to(ours).as_posix()) if real.is_relative_to(ours) else None
    if entry is not None and entry.use != ROWS:
        raise ConfigError(
            f"{path} is a file that a run in this output_dir writes",
            where=f"{key}: {path}",
            fix="copy it elsewhere first, or choose another output_dir",
        )


def _is_incidental(path: Path) -> bool:
    """Entries that leave a folder free for a run: INCIDENTAL, and checkpoints of ours copied here to resume from."""
    copied = fnmatch.fnmatchcase(path.name, "checkpoint-*") and (path / MANIFEST).is_file()
    return copied or _matches(path.name, INCIDENTAL)


def _names(folder: Path) -> Iterator[str]:
    with os.scandir(folder) as found:
        yield from (entry.name for entry in found if entry.name != RECORD)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
