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

ONE_FILE = 1e6  # GB: PEFT and ERNIEKit look for an adapter in a single file
_SIDE = re.compile(r"(.+)\.lora_([AB])(?:\.\w+)?(?:\.weight)?")


def config_fields(path: Path) -> dict[str, Any]:
    config = read_json(path)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path.name} is not a JSON object", where=str(path))
    return config


def rank_and_alpha(config: dict[str, Any], where: str) -> tuple[int, float]:
    rank, alpha = config.get("r"), config.get("lora_alpha", 8)
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise CheckpointError(f"r is {rank!r}, not a positive integer", where=where)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not alpha > 0:
        raise CheckpointError(f"lora_alpha is {alpha!r}, not a positive number", where=where)
    return rank, float(alpha)


def plain_number(value: float) -> float:
    """16, not 16.0: other readers declare alpha an integer."""
    return int(value) if float(value).is_integer() else value


def read_tensors(folder: Path, patterns: list[str]) -> dict[str, torch.Tensor]:
    """Tensors of the first pattern that matches files here; a pickle beside no safetensors is refused by name."""
    for pattern in patterns:
        files = [f for f in sorted(folder.glob(pattern)) if not f.name.startswith(("optimizer", "master_", "probe"))]
        if files:
            out: dict[str, torch.Tensor] = {}
            for file in files:
                check_safetensors(file)
                out.update(load_file(str(file)))
            # Older Paddle builds stored bf16 bits as uint16.
            return {n: t.view(torch.bfloat16) if t.dtype == torch.uint16 else t for n, t in out.items()}
    pickles = sorted(f.name for f in folder.iterdir() if f.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"the adapter is stored in {pickles[0]}, a pickle: opening it can run any program its author put inside",
            where=str(folder),
            fix="load it where it was made and save its tensors with safetensors, under the same names",
        )
    raise CheckpointError("no adapter weights", where=str(folder), fix=f"expected {patterns[0]} beside the config")


def paired(tensors: dict[str, torch.Tensor], where: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Layer name (wrappers' prefixes removed) -> its A and B, as stored."""
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _SIDE.fullmatch(key)
        if match is None or tensor.ndim != 2:
            raise CheckpointError(
                f"{key} is not part of a plain LoRA adapter", where=where, fix="only lora_A and lora_B can be read"
            )
        sides.setdefault(match[1].removeprefix("base_model.model."), {})[match[2]] = tensor
    lone = next((name for name, pair in sides.items() if len(pair) < 2), None)
    if lone is not None:
        raise CheckpointError(f"{lone} has only one of lora_A and lora_B", where=where, fix="the file is incomplete")
    return {name: (pair["A"], pair["B"]) for name, pair in sides.items()}
