"""What TRL computed on a tiny Llama (tests/data/trl/record.py), and the same models and rows here."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder

FOLDER = Path(__file__).resolve().parents[1] / "data" / "trl"
REFERENCE_SCALE = 1.1  # of every matrix, as record.py makes the reference and the teacher


@cache
def recorded(part: str) -> dict[str, Any]:
    told = json.loads((FOLDER / "recorded.json").read_text(encoding="utf-8"))
    return told[part]


def model(scale: float = 1.0) -> nn.Module:
    made = ModelFolder(FOLDER).build(torch.float32)
    with torch.no_grad():
        for param in made.parameters():
            param.mul_(scale if param.dim() > 1 else 1.0)
    return made


def gradient_norms(made: nn.Module) -> dict[str, float]:
    """By the names that transformers gives: a fused matrix is several there."""
    folder = ModelFolder(FOLDER)
    grads = {name: param.grad for name, param in made.named_parameters()}
    out: dict[str, float] = {}
    for entry in folder.entries():
        grad = grads.get(entry.ours)
        if grad is not None:
            out.update({name: float(part.norm()) for name, part in zip(entry.theirs, entry.write(grad))})
    return out
