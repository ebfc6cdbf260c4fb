"""Tiny models of each family, and a GGUF file read by the gguf package's own reader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from erniekit.demo.tiny import FAMILIES, make_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {family: make_tiny_model(root / family, family=family) for family in FAMILIES}


@dataclass(frozen=True)
class Opened:
    fields: dict[str, Any]
    words: dict[str, str]  # tensor -> Q8_0 ...
    data: dict[str, np.ndarray]

    def weights(self, name: str) -> torch.Tensor:
        kind = gguf.GGMLQuantizationType[self.words[name]]
        return torch.from_numpy(gguf.quants.dequantize(self.data[name], kind).copy())


@pytest.fixture(scope="session")
def opened() -> Callable[[Path], Opened]:
    def read(folder: Path) -> Opened:
        (file,) = folder.glob("*.gguf")
        reader = gguf.GGUFReader(file)
        fields = {key: field.contents() for key, field in reader.fields.items()}
        words = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        return Opened(fields, words, {tensor.name: tensor.data for tensor in reader.tensors})

    return read
