"""Whether a model that erniekit saved is still the one it saved: its files by their digests, its answers by the probe.

Every reader of weights asks `check_published`: model_folder.py, lora/adapter_files.py, api_load.py. Digests are those
of MANIFEST.json in checkpoints and exports, and of the folder's record in an output_dir.
"""

from __future__ import annotations

import fnmatch
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from erniekit.checkpoint import manifest, probe
from erniekit.checkpoint.final_model import model_files
from erniekit.checkpoint.fp8_file import FILE as FP8_SCALES
from erniekit.checkpoint.manifest import MANIFEST, SAMPLED_ABOVE, Damaged, FileRecord, Verify, depth_of, kind_of
from erniekit.errors import CheckpointError
from erniekit.files.json_file import MAX_BYTES, read_object
from erniekit.files.lfs_pointer import refuse_pointer
from erniekit.files.listed import Listed, has_file
from erniekit.files.record import RECORD, OwnedFiles
from erniekit.files.tokenizer_names import TOKENIZER_FILES
from erniekit.log import warn, warn_once
from erniekit.model_contract import packed_layers, spread

# What a model computes with; settings such as generation_config.json, and names of classes, may be edited.
COMPUTES = (
    "config.json", "model*.safetensors*", "adapter_config.json", "adapter_model*.safetensors*", "lora_config.json",
    "peft_model*.safetensors*", *TOKENIZER_FILES,
)  # fmt: skip
_EDITABLE = (".json", ".jinja", ".txt")  # people change a context length or a chat template there
_PROBED_ABOVE = 2_000_000_000  # bytes; where the probe is run as well, only samples of more are read
_SET_ASIDE = re.compile(r"checkpoint-\d+\.corrupt-\d+")
_compared: set[tuple[str | int, ...]] = set()  # a command opens a folder several times; files are read once


class Comparison(NamedTuple):
    """What check_published found of a folder that may be used."""

    whole: bool  # all bytes were compared, or none are recorded
    edited: tuple[str, ...] = ()  # settings that are not as they were saved


def check_published(folder: Path, verify: Verify = "auto", probed: bool = False) -> Comparison:
    """Raises `Damaged` where a file is not what was saved; an edited setting is warned of.

    verify: as the key of that name. probed: the caller runs the probe, where there is one (`check_answer`)."""
    set_aside = bool(_SET_ASIDE.fullmatch(folder.resolve().name))
    records, way_out = _records(folder, set_aside)
    if not records:
        return Comparison(whole=True)
    size = sum(found[-1].size for found in records.values())
    depth = "full" if set_aside else depth_of(verify, size)
    if probed and verify == "auto" and size > _PROBED_ABOVE and has_file(folder, probe.FILE) and not set_aside:
        depth = "sample"
    edited = []
    earlier, latest = "", ""  # of files under whose names several contents were written
    for name, found in records.items():
        if name in TOKENIZER_FILES and kind_of(folder / name) is None:  # another folder's may be used instead
            warn_once(f"{folder / name} is missing: it was there when the model was saved")
            continue
        try:
            match = _compare(folder / name, name, found, depth)
            if match is not None and len({record.sha256 for record in found}) > 1 and not name.endswith(_EDITABLE):
                earlier, latest = (earlier, name) if match.sha256 == found[-1].sha256 else (name, latest)
        except Damaged as error:
            if name.endswith(_EDITABLE) and (folder / name).is_file():
                warn_once(f"{folder / name} is not as it was saved: it was edited, or is damaged")
                edited.append(name)
                continue
            raise Damaged(f"{folder} is damaged: {error.what}", where=error.where, fix=way_out) from None
    if earlier and latest:
        what = f"{folder} holds parts of two models: {earlier} is of an earlier one than {latest}"
        raise Damaged(f"{what}; it was being written when the run ended", where=str(folder / earlier), fix=way_out)
    if set_aside:
        warn_once(f"{folder} was set aside as damaged; the files of its model are whole, and used")
    return Comparison(depth == "full", tuple(edited))


def check_checkpoint(folder: Path, depth: manifest.Depth, only: Callable[[str], bool] = lambda name: True) -> None:
    """Raises `Damaged` where a file of a checkpoint with a manifest is not what was saved. Settings may be edited ones,
    as long as they can be read; scales of fp8 are none. only: the files, by name, that matter."""

    def is_setting(name: str) -> bool:
        return name.endswith(_EDITABLE) and name != FP8_SCALES

    saved = manifest.check(folder, depth, only=lambda name: only(name) and not is_setting(name))
    for name in filter(only, saved.files):
        if is_setting(name):
            try:
                manifest.check(folder, depth, only=name.__eq__)
            except Damaged:
                if not (name in model_files(saved) and _can_be_read(folder / name)):
                    raise
                if not _computes(name):  # of those check_published warns
                    warn_once(f"{folder / name} was changed after it was saved; it is used as it is now")


def _can_be_read(path: Path) -> bool:
    """A setting that a person wrote; not what is left of a file that was cut, emptied or overwritten."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:  # reading a pipe waits for ever
            return False
        if path.suffix == ".json":
            return bool(read_object(path, CheckpointError))
        text = path.read_text(encoding="utf-8")
    except (CheckpointError, OSError, UnicodeDecodeError):
        return False
    return bool(text.strip()) and "\0" not in text


@torch.no_grad()
def check_answer(folder: Path, model: nn.Module, verify: Verify = "auto") -> None:
    """Of a folder of which not all bytes were compared: one whose model does not repeat its probe is read whole.

    verify: how the folder was compared, in view of this."""
    saved = probe.load(folder, spread(model).config)
    if saved is None or saved.rows is None or packed_layers(model) or has_file(folder, FP8_SCALES):
        check_published(folder, verify)  # logits of rounded weights differ: they tell nothing
        return
    first = next(model.parameters())
    logits = model(saved.ids.to(first.device), **saved.more(first.device))
    if logits.shape[-1] != saved.rows.shape[-1]:  # below an adapter with a score head of its own
        check_published(folder, verify)
        return
    verdict = probe.compare(logits, saved, probe.allowed(saved, first.dtype))
    if verdict.max_difference <= verdict.tolerance:  # NaN is not
        return
    warn(f"{folder} does not answer as it did when it was saved ({verdict.failed()}): all its files are compared")
    check_published(folder, "full")
    # Rounding tips a router's choice between two nearly equal experts; another torch or device may have other kernels.
    warn(f"{folder}: its files are those that were saved")


def _records(folder: Path, set_aside: bool) -> tuple[dict[str, list[FileRecord]], str]:
    """What may stand in each file, by its name; and what to do where it does not."""
    other = "use another checkpoint of the run, or a good copy of this one"
    if Listed(folder).by_us:
        yours = f"if you changed it, delete {MANIFEST}: the folder is then read as it is, and no longer checked"
        try:
            saved = manifest.load(folder)
        except Damaged as error:
            fix = f"{other}; {yours}"
            raise Damaged(f"{folder} is damaged: {error.what}", where=error.where, fix=fix) from None
        return {name: [record] for name, record in saved.files.items() if _computes(name)}, f"{other}; {yours}"
    if set_aside:
        raise Damaged(f"{folder} was set aside as damaged", where=str(folder), fix=other)
    owned = OwnedFiles(folder)
    if owned.emptied:
        warn_once(f"{owned.path} is empty or damaged: it is not known whether the model's files are as they were saved")
    recorded = {
        name: [FileRecord(content.size, content.sha256, content.sample) for content in entry.digests]
        for name, entry in owned.entries().items()
        if entry.digests and _computes(name) and kind_of(folder / name) is not None
    }
    yours = (
        f"if you changed it, copy the model's files to a folder of their own, without {RECORD}: it is no longer checked"
    )
    return recorded, f"use a checkpoint of the run, or a good copy; {yours}"


def _computes(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in COMPUTES)


def _compare(path: Path, name: str, records: list[FileRecord], depth: manifest.Depth) -> FileRecord | None:
    """Which of the records it is, the last where several are; None: its bytes were not looked at."""
    found = kind_of(path)
    if found is None:
        raise Damaged(f"{name} is missing", where=str(path))
    alike = [record for record in reversed(records) if record.size == found.st_size]
    if not alike:
        refuse_pointer(path)
        raise Damaged(f"{name} has {found.st_size} bytes, {records[-1].size} were saved", where=str(path))
    if depth == "size":
        return None
    if depth == "sample":
        alike = [record for record in alike if record.sample] or (alike if found.st_size <= SAMPLED_ABOVE else [])
        if not alike:
            return None  # a folder's record may hold no samples: earlier versions wrote none
    # With the change time: the other can be set back by whoever writes to the file.
    same_file = (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
    seen = [(*same_file, depth, record.sha256) for record in alike]
    for record, key in zip(alike, seen, strict=True):
        if key in _compared:
            return record
    for record, key in zip(alike, seen, strict=True):
        try:
            manifest.check_content(path, name, record, depth)
        except Damaged:
            if record is alike[-1]:
                raise
        else:
            _compared.add(key)
            return record
    return None
