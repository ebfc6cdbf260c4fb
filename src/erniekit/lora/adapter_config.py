"""What adapter folders of every kind share: a JSON config, and tensors named lora_A and lora_B. No pickle is opened.

Called by peft_files.py and paddle_files.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from erniekit.checkpoint.safe import PICKLE_SUFFIXES, check_safetensors, read_json
from erniekit.errors import CheckpointError
from erniekit.files.listed import Listed
from erniekit.models.fields import shown

MAX_RANK, MAX_ALPHA = 1 << 16, 1e9
_AGAIN = "download or copy the adapter again"
ONE_FILE = 1e6  # GB: PEFT and ERNIEKit look for an adapter in a single file
MAX_PATTERN = 1024  # characters
_REPEATS = re.compile(r"(?<!\\)[*+{]")
_SIDE = re.compile(r"(.+)\.lora_([AB])(?:\.\w+)?(?:\.weight)?")
_MAGNITUDE = re.compile(r"(.+)\.lora_magnitude_vector(?:\.\w+)?(?:\.weight)?")


def config_fields(path: Path) -> dict[str, Any]:
    config = read_json(path)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path.name} is not a JSON object", where=str(path))
    return config


def rank_and_alpha(config: dict[str, Any], where: str) -> tuple[int, float]:
    rank, alpha = config.get("r"), config.get("lora_alpha", 8)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        what = f"r is {shown(rank)}, not a positive integer up to {MAX_RANK}"
        raise CheckpointError(what, where=f"{where}, key r", fix=_AGAIN)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= MAX_ALPHA:
        what = f"lora_alpha is {shown(alpha)}, not a positive number up to {MAX_ALPHA:g}"
        raise CheckpointError(what, where=f"{where}, key lora_alpha", fix=_AGAIN)
    return rank, float(alpha)


def plain_number(value: float) -> float:
    """16, not 16.0: other readers declare alpha an integer."""
    return int(value) if float(value).is_integer() else value


def read_tensors(folder: Path, patterns: list[str]) -> dict[str, torch.Tensor]:
    """Tensors of the first pattern that matches files here; a pickle without safetensors is refused by name."""
    listed = Listed(folder)
    for pattern in patterns:
        files = [f for f in listed.glob(pattern) if not f.name.startswith(("optimizer", "master_", "probe"))]
        if files:
            out: dict[str, torch.Tensor] = {}
            for file in files:
                check_safetensors(file)
                out.update(load_file(str(file)))
            # Older Paddle builds stored bf16 bits as uint16.
            out = {n: t.view(torch.bfloat16) if t.dtype == torch.uint16 else t for n, t in out.items()}
            if odd := next((n for n, t in out.items() if not t.is_floating_point()), None):
                what = f"{odd} holds {str(out[odd].dtype).removeprefix('torch.')} numbers, which no adapter is made of"
                raise CheckpointError(what, where=str(folder), fix=_AGAIN)
            return out
    pickles = sorted(f.name for f in folder.iterdir() if f.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"the adapter is stored in {pickles[0]}, a pickle: opening it can run any program its author put inside",
            where=str(folder),
            fix="load it where it was made and save its tensors with safetensors, under the same names",
        )
    raise CheckpointError("no adapter weights", where=str(folder), fix=f"expected {patterns[0]} beside the config")


def refuse_other_names(tensors: dict[str, torch.Tensor], where: str) -> None:
    for key, tensor in tensors.items():
        if _SIDE.fullmatch(key) is None or tensor.ndim != 2:
            raise CheckpointError(
                f"{key} is not part of a plain LoRA adapter", where=where, fix="only lora_A and lora_B can be read"
            )


def paired(tensors: dict[str, torch.Tensor], where: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Layer name (wrappers' prefixes removed) -> its A and B, as stored."""
    refuse_other_names(tensors, where)
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _SIDE.fullmatch(key)
        assert match is not None
        pair = sides.setdefault(match[1].removeprefix("base_model.model."), {})
        if match[2] in pair:
            what = f"the file holds lora_{match[2]} of {match[1]} twice, as of two adapters"
            raise CheckpointError(what, where=where, fix="save each adapter into a folder of its own")
        pair[match[2]] = tensor
    lone = next((name for name, pair in sides.items() if len(pair) < 2), None)
    if lone is not None:
        raise CheckpointError(f"{lone} has only one of lora_A and lora_B", where=where, fix="the file is incomplete")
    return {name: (pair["A"], pair["B"]) for name, pair in sides.items()}


def magnitudes(tensors: dict[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
    """Layer name -> DoRA's row lengths, taken out of `tensors`."""
    found = {}
    for key in [key for key in tensors if _MAGNITUDE.fullmatch(key)]:
        match, tensor = _MAGNITUDE.fullmatch(key), tensors.pop(key)
        assert match is not None
        if tensor.ndim != 1 or not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{key} is not a list of row lengths", where=where, fix=_AGAIN)
        found[match[1].removeprefix("base_model.model.")] = tensor
    return found


def patterns_of(value: Any, where: str) -> dict[str, float]:
    """PEFT's alpha_pattern: regular expressions of module names with a number each. Those that could be matched in more
    than a few ways are refused: one crafted expression keeps the matcher busy for years."""
    if value is None:
        return {}
    fine = isinstance(value, dict) and all(
        isinstance(v, int | float) and not isinstance(v, bool) and 0 < v <= MAX_ALPHA for v in value.values()
    )
    if not fine:
        raise CheckpointError(f"{shown(value)} is not a map of names to positive numbers", where=where, fix=_AGAIN)
    for pattern in value:
        try:
            re.compile(pattern)
            repeated = _repeated(pattern)
            simple = len(pattern) <= MAX_PATTERN and len(repeated) <= 3 and ")" not in repeated
        except (re.error, RecursionError, OverflowError):
            simple = False
        if not simple:
            raise CheckpointError(
                f"{shown(pattern)} is not a simple pattern of module names",
                where=where,
                fix="write the names themselves, or merge the adapter with peft and use the merged model as base",
            )
    return dict(value)


def _repeated(pattern: str) -> list[str]:
    """What stands before each repetition."""
    return [pattern[found.start() - 1 : found.start()] for found in _REPEATS.finditer(pattern)]
