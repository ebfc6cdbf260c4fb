"""Which model a folder holds, as one short digest: config.json and a sample of every tensor, whatever the path, the
dates or the number of files. Computed when a run starts, stored with adapters (base_model.json), and compared by a
resume, by the ranks of a run, and where an adapter is put on a base.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from erniekit import heartbeat
from erniekit.checkpoint.model_folder import read_json, tensor_files
from erniekit.checkpoint.safe import TensorEntry, check_safetensors
from erniekit.checkpoint.shards import write_json
from erniekit.errors import CheckpointError
from erniekit.files.listed import has_file

FILE = "base_model.json"
VERSION = 1  # of the digest: raise it when the same folder would give another
WHOLE = 64 << 20  # bytes of weights; a model up to this size is read completely
SMALL = 16 << 10  # bytes; a tensor up to this size (norms, biases) is read completely
BLOCK = 4 << 10  # bytes read at each sampled place: a page
BLOCKS = 8192  # sampled places of a model: 32 MiB, spread over its tensors
FEWEST = 4  # places of a tensor, its first and its last bytes among them
# Written by the last program that saved the folder; they do not change the function it computes.
_IDLE = (
    "_name_or_path", "name_or_path", "transformers_version", "use_cache", "architectures", "auto_map", "torch_dtype",
    "dtype",
)  # fmt: skip


def model_identity(folder: Path, weights: bool = True) -> str:
    """Digest of config.json and of every tensor's name, dtype, shape and content: all of it up to WHOLE bytes, evenly
    spaced blocks of each tensor beyond, so that 40 GB cost a second. weights=False: config.json only."""
    config = {key: value for key, value in read_json(folder / "config.json").items() if key not in _IDLE}
    digest = hashlib.sha256(f"erniekit model {VERSION}\n{json.dumps(config, sort_keys=True)}\n".encode())
    if weights:
        _add_tensors(digest, tensor_files(folder))
    return digest.hexdigest()[:32]


def _add_tensors(digest: Any, files: dict[str, Path]) -> None:
    headers = {file: check_safetensors(file).tensors for file in sorted(set(files.values()))}
    entries = {name: (file, headers[file][name]) for name, file in sorted(files.items()) if name in headers[file]}
    total = sum(entry.end - entry.start for _, entry in entries.values())
    blocks = 0 if total <= WHOLE else max(FEWEST, BLOCKS // max(1, len(entries)))
    with ExitStack() as stack:
        opened = {file: stack.enter_context(file.open("rb", buffering=0)).fileno() for file in headers}
        for name, (file, entry) in entries.items():
            heartbeat.beat()
            digest.update(f"{name} {entry.dtype} {list(entry.shape)}\n".encode())
            try:
                _add_content(digest, opened[file], entry, blocks)
            except OSError as error:
                raise CheckpointError(f"{file.name} cannot be read: {error.strerror}", where=str(file)) from error


def _add_content(digest: Any, file: int, entry: TensorEntry, blocks: int) -> None:
    size = entry.end - entry.start
    if not blocks or size <= max(SMALL, blocks * BLOCK):
        for at in range(entry.start, entry.end, 1 << 20):
            digest.update(os.pread(file, min(1 << 20, entry.end - at), at))
        return
    for k in range(blocks):
        digest.update(os.pread(file, BLOCK, entry.start + (size - BLOCK) * k // (blocks - 1)))


def write_base(folder: Path, identity: str, base: str) -> None:
    """Writes to an adapter's folder which model it was trained on. `base`: its path then, for people."""
    write_json(folder / FILE, {"identity": identity, "base": base})


def read_base(folder: Path) -> str | None:
    """The identity of the model an adapter was trained on; None where its folder has no record of it."""
    if not has_file(folder, FILE):
        return None
    identity = read_json(folder / FILE).get("identity")
    return identity if isinstance(identity, str) and identity else None
