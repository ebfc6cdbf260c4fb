"""A safetensors file written from tensors' memory."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file

from erniekit.checkpoint.tensor_file import write_tensors


def test_tensors_without_elements_numbers_alone_and_large_ones_are_read_back_by_the_library(tmp_path: Path) -> None:
    tensors = {
        "none": torch.zeros(0, 4),
        "one": torch.tensor(2.5),
        "large": torch.arange(3 << 20, dtype=torch.float32),  # more than is hashed at a time
        "narrow": torch.randn(5).bfloat16(),
    }
    record = write_tensors(tmp_path / "t.safetensors", tensors, {"format": "pt"})
    read = load_file(tmp_path / "t.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    content = (tmp_path / "t.safetensors").read_bytes()
    assert (record.size, record.sha256) == (len(content), hashlib.sha256(content).hexdigest())
