"""Local datasets that a command names and that do not exist, found before torch is imported, which takes seconds.

Called by first_line.py and run.py. What is there is opened later, by its readers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from glob import escape, glob

from erniekit.config import RunConfig
from erniekit.errors import DataError


def refuse_missing_data(cfg: RunConfig) -> None:
    """DataError for the first that is missing, as its reader would raise it."""
    _refuse_divided(cfg)
    missing = [path for key in _read_keys(cfg) for path in cfg[key] or () if not os.path.exists(path)]
    if not missing:
        return
    from pathlib import Path

    from erniekit.data.storage import LocalFile, as_place, listed_files

    for place in map(as_place, missing):
        if isinstance(place, Path):
            for file in listed_files([place], text=cfg.train.stage == "PT"):  # a pattern
                LocalFile(Path(file.path)).refuse_other()


def _refuse_divided(cfg: RunConfig) -> None:
    """A single file whose name has a comma, at which keys of several files are divided."""
    for key in _read_keys(cfg, streamed=True):
        parts = cfg[key] or ()
        whole = "" if all(map(os.path.exists, parts)) else _whole(parts)
        if whole:
            raise DataError(
                "commas separate datasets, and the name of this file has one",
                where=f"{key}: {whole}",
                fix=f"write ? for it: {whole.replace(',', '?')}; or in a recipe a list: {key}: [{json.dumps(whole)}]",
            )


def _whole(parts: Sequence[str]) -> str:
    """The file that these are the parts of, "" where there is none. They have lost spaces that stood beside commas."""
    if len(parts) < 2:
        return ""
    written = os.path.expanduser(",".join(parts))
    if os.path.isfile(written):
        return written
    near = glob(
        ",".join(f"*{escape(part)}*" if k else f"{escape(os.path.expanduser(part))}*" for k, part in enumerate(parts))
    )
    return next((file for file in near if re.sub(r"\s*,\s*", ",", file) == written and os.path.isfile(file)), "")


def _read_keys(cfg: RunConfig, streamed: bool = False) -> Iterator[str]:
    """The keys of datasets that this command opens; streamed: those, too, that are read while a run trains, which are
    left to their stream else."""
    d, t = cfg.data, cfg.train
    files_of_tokens = t.stage == "PT" and bool(d.input_dir or d.data_filelist)
    if cfg.command == "eval":
        if not t.eval_tasks:
            yield "eval_dataset_path"
        return
    rows = bool(d.train_dataset_path) and not files_of_tokens
    if rows and (streamed or not d.streaming):
        yield "train_dataset_path"
    if cfg.command == "quantize":
        if rows or files_of_tokens:
            yield "eval_dataset_path"
    elif t.do_eval or t.evaluation_strategy != "no":
        yield "eval_dataset_path"
    if t.stage == "VL-SFT" and cfg.command != "quantize":
        yield "text_dataset_path"
