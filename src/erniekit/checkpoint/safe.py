"""What may be read from a weight folder: safetensors with a sane header, JSON of a sane size, no pickle.
Used before any tensor is loaded by model_folder.py, slices.py, probe.py, identity.py and lora."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from erniekit.checkpoint.manifest import unreadable
from erniekit.errors import CheckpointError
from erniekit.files import refuse_special
from erniekit.files.json_file import MAX_BYTES, read_value
from erniekit.files.lfs_pointer import refuse_pointer

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".pdparams", ".pdopt", ".pdstates")
_MAX_HEADER = 32 << 20  # bytes: some 200,000 tensors in one file; larger ones take seconds and gigabytes to parse
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    dtype: str  # safetensors' name: BF16, F32, ...
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    end: int


@dataclass(frozen=True)
class SafetensorsHeader:
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]


def check_safetensors(path: Path) -> SafetensorsHeader:
    """The header, after checking that every tensor lies inside the file, and apart. Reads the header only."""
    path = Path(path)
    refuse_pickle(path)
    refuse_special(path, CheckpointError)
    try:
        return _read_header(path)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        refuse_pointer(path)
        raise CheckpointError(
            f"{path.name} is not a valid safetensors file: {error}",
            where=str(path),
            fix="copy or download the file again; it is cut short, damaged or made to look like one",
        ) from None


def refuse_pickle(path: Path) -> None:
    """A pickle runs whatever its author wrote."""
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise CheckpointError(
            f"{path.name} is a pickle: loading it can run any program its author put inside",
            where=str(path),
            fix="convert the weights to safetensors with the program that wrote them",
        )


def read_json(path: Path, *, max_bytes: int = MAX_BYTES) -> Any:
    """A JSON file from a checkpoint or model folder; any failure is a CheckpointError that names the file."""
    path = Path(path)
    try:
        return read_value(path, CheckpointError, max_bytes)
    except OSError as error:
        raise unreadable(path, error) from error


def _read_header(path: Path) -> SafetensorsHeader:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise ValueError(f"{size} bytes, less than the length field")
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MAX_HEADER or length > size - 8:
            raise ValueError(f"says its header has {length} bytes; the file has {size}")
        raw = file.read(length)
    if not raw.startswith(b"{"):
        raise ValueError("its header is not JSON")
    header = json.loads(raw.decode(), object_pairs_hook=_no_twins, parse_constant=_refuse_constant)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its metadata is not a map of texts")
    json.dumps([*metadata.items(), *header], ensure_ascii=False).encode()  # half a surrogate pair: no valid name
    data = 8 + length
    tensors = {name: _entry(name, fields, data) for name, fields in header.items()}
    _check_cover(tensors, data, size)
    return SafetensorsHeader(tensors, metadata)


def _entry(name: str, fields: Any, data: int) -> TensorEntry:
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise ValueError(f"{name!r} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"{name!r} has the unknown dtype {str(dtype)[:40]!r}")
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise ValueError(f"{name!r} has a shape or offsets that are not sizes")
    start, end = offsets
    bits = _BITS[dtype] * _count(shape, limit=8 * max(0, end - start))
    if start > end or bits != 8 * (end - start):
        raise ValueError(
            f"{name!r} has {end - start} bytes; dtype {dtype} and shape {str(shape)[:80]} need another number"
        )
    return TensorEntry(dtype, tuple(shape), data + start, data + end)


def _check_cover(tensors: dict[str, TensorEntry], data: int, size: int) -> None:
    """No overlaps, no holes, nothing behind the last tensor: the rule of the format."""
    reached = data
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != reached:
            kind = "overlaps another tensor" if entry.start < reached else "leaves a hole before it"
            raise ValueError(f"{name!r} {kind}")
        reached = entry.end
    if reached != size:
        raise ValueError(f"its tensors end at byte {reached}; the file has {size}")


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _count(shape: list[int], limit: int) -> int:
    """Product of the shape; stops past `limit`, so that a million huge dims cost nothing."""
    if 0 in shape:
        return 0
    count = 1
    for dim in shape:
        count *= dim
        if count > limit:
            break
    return count


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header names something twice")
    return found


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"its header holds {constant}")
