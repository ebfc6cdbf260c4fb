"""What a checkpoint holds, whatever layout wrote it: weights by their files, states by their tensors."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from erniekit.checkpoint.slices import TensorFiles

STATES = ("optimizer", "master_weights")


def stored_digests(folder: Path) -> dict[str, str]:
    """Without the probe: its logits may be added up in another order by another layout."""
    files = [p for p in folder.glob("*.safetensors") if not p.name.startswith((*STATES, "probe"))]
    found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    for stem in STATES:
        stored = TensorFiles.of_stem(folder, stem)
        for name in stored.files:
            value = stored.read(name)
            bits = value.reshape(-1).view(torch.uint8).numpy().tobytes()
            found[f"{stem} {name} {value.dtype} {tuple(value.shape)}"] = hashlib.sha256(bits).hexdigest()
    return found
