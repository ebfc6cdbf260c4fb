"""Describes what changed between two runs: contents are compared by digests, which mean nothing to a reader.

Called by resume.py (a checkpoint against this run) and same_run.py (ranks against each other).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from erniekit.printable import counted

TRAIN_DATA = "train data (content and shares)"
EVAL_DATA = "evaluation data"
MODEL_CONFIG = "model's config.json"
BASE = "base model"
ADAPTER = "adapter in lora_path"
# Where one of these is another, a checkpoint's weights fit no tensor of the run, or not the scale of its adapters.
_OF_ADAPTERS = ("lora_rank", "lora_alpha", "rslora", "lora_target_modules", "use_dora")
# Weights fit, but some of the optimiser's states were not saved.
_OF_STATES = ("compute_type", "optim", "master_weights")
CONTENTS = (TRAIN_DATA, EVAL_DATA, MODEL_CONFIG, BASE, ADAPTER)  # their values are digests

_SINCE = {
    MODEL_CONFIG: "is not what it was when the checkpoint was saved",
    BASE: "is another model, or its weights have changed",
}


def describe_changes(saved: Mapping[str, Any], now: Mapping[str, Any], files: Sequence[str]) -> list[str]:
    """A line for everything that both have and that differs. `files`: the names of this run's training files."""
    return [_line(key, saved[key], now[key], files) for key in now if key in saved and saved[key] != now[key]]


def other_weights(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys that differ and by which this run trains other weights than the checkpoint holds."""
    keys = ("fine_tuning", *(_OF_ADAPTERS if now.get("fine_tuning") == "LoRA" else ()))
    return [key for key in keys if key in saved and key in now and saved[key] != now[key]]


def other_states(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys that differ and by which the optimiser has other states than the checkpoint holds."""
    differ = [key for key in _OF_STATES if key in saved and key in now and saved[key] != now[key]]
    return [key for key in differ if (key, now[key]) != ("compute_type", "fp32")]  # which has only fewer


def _line(key: str, saved: Any, now: Any, files: Sequence[str]) -> str:
    if key in _SINCE:
        return f"{key}: {_SINCE[key]}"
    if key == TRAIN_DATA and isinstance(saved, list) and isinstance(now, list):
        return f"train data: {_data(saved, now, files)}"
    return f"{key}: {saved!r} -> {now!r}"


def _data(saved: Sequence[str], now: Sequence[str], files: Sequence[str]) -> str:
    if len(saved) != len(now):
        return f"{counted(len(saved), 'data set')} then, {len(now)} now"
    if sorted(saved) == sorted(now):
        return "the same files in another order"
    at = [i for i, (old, new) in enumerate(zip(saved, now)) if old != new]
    named = [files[i] if len(files) == len(now) else f"data set {i + 1}" for i in at]
    has, its = ("has", "its") if len(at) == 1 else ("have", "their")
    if all(_rows(saved[i]) == _rows(now[i]) for i in at):
        return f"a picture or video that rows of {', '.join(named)} name is not what it was"
    return f"{', '.join(named)} {has} other content, or {its} share or the tokenizer changed"


def _rows(fingerprint: str) -> str:
    """The part of a fingerprint about rows: with pictures it is `rows-media` (VisionSource.fingerprint)."""
    return fingerprint.rpartition("-")[0] or fingerprint


def content_letters(values: Sequence[Any]) -> dict[Any, str]:
    """`content A`, `content B` for values that are digests, in the order they are met."""
    return {value: f"content {chr(ord('A') + i % 26)}" for i, value in enumerate(dict.fromkeys(values))}
