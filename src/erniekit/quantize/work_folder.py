"""Finished layers, kept next to the result while a model is quantised: a killed run continues where it was.

Used by run.py. Each layer is a folder of its own, published whole with a manifest; an unlike run's are discarded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from erniekit.checkpoint import manifest, writer
from erniekit.checkpoint.manifest import Damaged, NoManifest
from erniekit.checkpoint.shards import write_shards
from erniekit.errors import CheckpointError
from erniekit.files.record import NotOurs, some
from erniekit.log import emit
from erniekit.printable import counted

STEM = "weights"
_LAYER = re.compile(r"layer-\d{5}")


class WorkFolder:
    """identity: everything that decides the bytes of a layer. The caller holds the lock of the result."""

    def __init__(self, out: Path, identity: Mapping[str, Any]) -> None:
        self.path = out.parent / f".erniekit-{out.name}.layers"
        self.identity = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def open(self) -> int:
        """How many layers are done; they are the first ones."""
        if self.path.is_symlink():
            raise NotOurs(f"{self.path.name} is a link", where=str(self.path), fix="move it away")
        if self.path.exists() and not self.path.is_dir():
            raise NotOurs(f"{self.path.name} is not a folder", where=str(self.path), fix="move it away")
        if not self.path.exists():
            self.path.mkdir(parents=True)
            return 0
        writer.sweep(self.path, "layer-*")
        if strange := [entry.name for entry in self.path.iterdir() if not _LAYER.fullmatch(entry.name)]:
            raise NotOurs(
                f"{self.path.name} holds {some(sorted(strange))}, not written by erniekit",
                where=str(self.path),
                fix="move it away",
            )
        done = 0
        while self._is_good(self._layer(done)):
            done += 1
        for left in sorted(self.path.iterdir()):
            if int(left.name.removeprefix("layer-")) >= done:
                self._discard(left)
        if done:
            emit(f"resumed  {counted(done, 'layer is', 'layers are')} done already ({self.path})")
        return done

    def save(self, number: int, parts: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        size = sum(part.numel() * part.element_size() for part in parts.values())

        def write(folder: Path) -> None:
            write_shards(folder, STEM, parts.items(), max_shard_size=1e6)

        info = {"identity": self.identity, "facts": dict(facts)}
        layer = self._layer(number)
        writer.publish(self.path, layer.name, write, info=info, expected_bytes=size)

    def parts(self, number: int) -> dict[str, torch.Tensor]:
        return load_file(str(self._layer(number) / f"{STEM}.safetensors"))

    def facts(self, number: int) -> dict[str, Any]:
        facts: dict[str, Any] = manifest.load(self._layer(number)).info["facts"]
        return facts

    def clear(self) -> None:
        """Once the result is published."""
        for layer in sorted(self.path.iterdir()):
            self._discard(layer)
        self.path.rmdir()

    def _layer(self, number: int) -> Path:
        return self.path / f"layer-{number:05d}"

    def _is_good(self, layer: Path) -> bool:
        if not layer.is_dir():
            return False
        try:
            return manifest.check(layer, "full").info.get("identity") == self.identity
        except (Damaged, NoManifest):
            return False

    def _discard(self, layer: Path) -> None:
        """Only what a manifest says we wrote."""
        try:
            strange = manifest.unlisted(layer)
        except CheckpointError as error:
            raise NotOurs(f"{layer.name}: {error.what}", where=str(layer), fix="move it away") from None
        if strange:
            raise NotOurs(f"{layer.name} holds {some(strange)}", where=str(layer), fix="move it away")
        writer.discard(layer)
