"""A tiny ERNIE-4.5-VL folder with what a `-PT` release has beside its weights: code that vLLM runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from erniekit.demo.tiny_vision import make_tiny_vision

CODE = Path(__file__).with_name("vl_release")
AUTO = {
    "config.json": {"AutoConfig": "configuration_ernie4_5_vl.Ernie4_5_VLConfig"},
    "preprocessor_config.json": {"AutoProcessor": "processing_ernie4_5_vl.Ernie4_5_VLProcessor"},
}
# Heads of 32 channels are the smallest that vLLM's CPU attention has; other widths it pads.
SHAPE = {"hidden_size": 128, "freq_allocation": 4, "num_hidden_layers": 3, "moe_layer_end_index": [5, 4],
         "moe_intermediate_size": [64, 32], "rope_theta": 20000.0}  # fmt: skip


def release_folder(folder: Path, without: tuple[str, ...] = (), **shape: Any) -> Path:
    """without: fields of config.json that are left out."""
    make_tiny_vision(folder, **{**SHAPE, **shape})
    file = folder / "model.safetensors"
    torch.manual_seed(4)
    save_file({name: _telling(name, value) for name, value in load_file(file).items()}, file, {"format": "pt"})
    copy_code(folder)
    for name, auto in AUTO.items():
        fields = json.loads((folder / name).read_text()) | {"auto_map": auto}
        (folder / name).write_text(json.dumps({key: fields[key] for key in fields if key not in without}))
    return folder


def copy_code(folder: Path) -> None:
    for code in CODE.glob("*.py"):
        shutil.copy(code, folder)


def _telling(name: str, value: torch.Tensor) -> torch.Tensor:
    """Norms and biases drawn, too: ones and zeros would not show which is which. Small patches: a norm of the tower
    then shows its epsilon."""
    if "patch_embed" in name:
        return value * 0.01
    return value + 0.1 * torch.randn_like(value) if value.ndim == 1 or "bias" in name else value
