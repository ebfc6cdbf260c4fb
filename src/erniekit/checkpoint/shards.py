"""Named tensors to safetensors files of bounded size and back. Used for models, optimiser states and master weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from erniekit import heartbeat
from erniekit.checkpoint.safe import check_safetensors
from erniekit.checkpoint.tensor_file import write_tensors
from erniekit.checkpoint.writer import working_name

GB = 1000**3


def write_json(path: Path, value: Any) -> None:
    # A path in it may hold bytes that are no UTF-8: their escapes are JSON's.
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_shards(
    folder: Path,
    stem: str,
    tensors: Iterable[tuple[str, torch.Tensor]],
    max_shard_size: float = 5.0,
    tag: str = "pt",
    lasting: bool = False,
) -> list[Path]:
    """`stem.safetensors`, or stem-0000k-of-0000n.safetensors with an index. max_shard_size in GB; holds one shard.

    lasting: tensors stay unchanged until the files are written, so that those in host memory need no copy."""
    limit, total = int(max_shard_size * GB), 0
    parts: list[tuple[Path, list[str]]] = []
    held: dict[str, torch.Tensor] = {}
    held_bytes = 0

    def flush() -> None:
        part = folder / working_name(stem, len(parts))
        part.unlink(missing_ok=True)  # of a process that was killed here
        write_tensors(part, held, {"format": tag})
        parts.append((part, list(held)))
        held.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if held and held_bytes + size > limit:
            flush()
            held_bytes = 0
        there = tensor.detach()
        here = there.to("cpu").contiguous()
        held[name] = here if lasting or here.data_ptr() != there.data_ptr() else here.clone()
        held_bytes, total = held_bytes + size, total + size
        heartbeat.beat()
    flush()
    _clear(folder, stem)
    if len(parts) == 1:
        return [parts[0][0].rename(folder / f"{stem}.safetensors")]
    files, weight_map = [], {}
    for k, (part, names) in enumerate(parts, start=1):
        files.append(part.rename(folder / f"{stem}-{k:05d}-of-{len(parts):05d}.safetensors"))
        weight_map.update(dict.fromkeys(names, files[-1].name))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / f"{stem}.safetensors.index.json", index)
    return files


def name_weights(folder: Path) -> None:
    """An index for a model in one file, before other tensors are put into the folder: vLLM and SGLang take every
    .safetensors of a folder that has none for weights."""
    file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if file.is_file() and not index.exists():
        header = check_safetensors(file)
        total = sum(entry.end - entry.start for entry in header.tensors.values())
        weight_map = dict.fromkeys(sorted(header.tensors), file.name)
        write_json(index, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _clear(folder: Path, stem: str) -> None:
    """An earlier model in the same folder, of another number of shards, must not be mixed with the new one."""
    for old in (*folder.glob(f"{stem}-*-of-*.safetensors"), *folder.glob(f"{stem}.safetensors*")):
        if old.name.endswith((".safetensors", ".safetensors.index.json")):
            old.unlink()
