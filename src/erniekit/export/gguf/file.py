"""A GGUF file written and read tensor by tensor, a few rows at a time. The one place that needs the `gguf` package.

Called by run.py. The package writes the header; the tensors follow it in the header's order, each at a multiple of
ALIGNMENT bytes.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch

from erniekit import heartbeat
from erniekit.errors import CheckpointError, ConfigError
from erniekit.export.gguf.blocks import Unstorable, decode, encode
from erniekit.export.gguf.types import row_bytes
from erniekit.extras import install_command

ALIGNMENT = 32
_READ = 4 << 20  # bytes read in one go
_AT_ONCE = 1 << 19  # weights that are converted in one go: what a tensor costs besides itself


@dataclass(frozen=True)
class StoredTensor:
    name: str
    shape: tuple[int, ...]  # as torch counts dims; the file has them the other way round
    type_name: str  # F32, Q8_0 ...

    @property
    def size(self) -> int:
        """In bytes."""
        return prod(self.shape[:-1]) * row_bytes(self.type_name, self.shape[-1])


def library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            "the gguf package is not installed", where="format: gguf", fix=install_command("gguf")
        ) from error
    return gguf


def write_header(path: Path, arch: str, fields: Mapping[str, Any], tensors: Sequence[StoredTensor]) -> None:
    gguf = library()
    logging.getLogger(gguf.__name__).setLevel(logging.WARNING)  # it prints its own progress
    writer = gguf.GGUFWriter(path, arch)
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](key, value)
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.type_name]
        # raw_dtype sets the tensor's type; the numpy dtype is ignored.
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


class GgufWriter:
    """Tensors appended behind a header, in its order."""

    def __init__(self, path: Path, source: Path) -> None:
        """source: whose weights they are, for errors."""
        self._file, self._source = path.open("ab"), source
        self.checksums: dict[str, int] = {}  # of each tensor's bytes

    def add(self, tensor: StoredTensor, weights: torch.Tensor) -> None:
        self._pad()
        checksum = 0
        for rows in _pieces(weights):
            try:
                data = encode(rows, tensor.type_name).numpy().data
            except Unstorable:
                raise CheckpointError(
                    f"{tensor.name} holds a weight that {tensor.type_name} cannot: inf, nan or too large",
                    where=str(self._source),
                    fix="check the weights; where they are only large, choose gguf_type=bf16",
                ) from None
            self._file.write(data)
            checksum = crc32(data, checksum)
            heartbeat.beat()
        self.checksums[tensor.name] = checksum

    def _pad(self) -> None:
        self._file.write(bytes(-self._file.tell() % ALIGNMENT))

    def close(self) -> None:
        self._pad()
        self._file.close()


class GgufTensors:
    """The tensors of a written file, read back with plain reads: pages of a mapping count as memory."""

    def __init__(self, path: Path, header: int, tensors: Sequence[StoredTensor]) -> None:
        """header: its size in bytes."""
        self._file = path.open("rb")
        weakref.finalize(self, self._file.close)
        self._at: dict[str, tuple[StoredTensor, int]] = {}
        offset = header + -header % ALIGNMENT
        for tensor in tensors:
            self._at[tensor.name] = tensor, offset
            offset += tensor.size + -tensor.size % ALIGNMENT

    def checksum(self, name: str) -> int:
        tensor, offset = self._at[name]
        out = 0
        for start in range(0, tensor.size, _READ):
            out = crc32(self._bytes(offset + start, min(_READ, tensor.size - start)), out)
        return out

    def fill(self, name: str, out: torch.Tensor, first: int = 0) -> None:
        """Rows from `first` on, in fp32."""
        tensor, offset = self._at[name]
        offset += first * row_bytes(tensor.type_name, out.shape[-1])
        for rows in _pieces(out):
            size = len(rows) * row_bytes(tensor.type_name, rows.shape[-1])
            data = torch.frombuffer(self._bytes(offset, size), dtype=torch.uint8)
            rows.copy_(decode(data.view(len(rows), -1), tensor.type_name))
            offset += size

    def _bytes(self, offset: int, size: int) -> bytearray:
        out = bytearray(size)
        self._file.seek(offset)
        self._file.readinto(out)
        heartbeat.beat()
        return out


def _pieces(weights: torch.Tensor) -> Iterator[torch.Tensor]:
    """[rows, columns] views, in order; an expert at a time, since those of one projection may lie apart."""
    for matrix in weights if weights.ndim == 3 else (weights[None] if weights.ndim == 1 else weights,):
        yield from matrix.split(max(1, _AT_ONCE // matrix.shape[-1]))
