"""Features of pictures on disk, for towers that are not trained: one file a picture, written once, checked when read.

recipes/vision_features.py says whose features they are and fills the store; VisionCollate reads it. A file appears
whole (written beside, then renamed), so that ranks, runs and a kill leave nothing half; one that does not hold what it
was written with is removed and counts as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from erniekit.data import cache_versions
from erniekit.data.media.decode import Medium
from erniekit.data.media.stamp import layout

FOLDER = "features"  # in the data cache folder
_END, _LEFT = ".safetensors", ".tmp-"
_OURS = re.compile(r"[^/]+/([0-9a-f]{2})/\1[0-9a-f]{38}\.safetensors(\.tmp-\d+-\d+)?")  # tower, picture
_OVERHEAD = 1024  # bytes of a file beside its features, at most


@dataclass(frozen=True)
class FeatureShape:
    """What is kept of a picture: of each patch the tower's output, or the resampler's of each token."""

    width: int
    dtype: torch.dtype
    tokens: bool = False  # the resampler's
    merge: int = 2
    pair: int = 2  # frames of a video that become one

    def rows(self, grid: tuple[int, int, int]) -> int:
        t, h, w = grid
        if not self.tokens:
            return t * h * w
        return t * h * w // (self.merge**2 * (self.pair if t > 1 else 1))

    def bytes(self, grid: tuple[int, int, int]) -> int:
        return self.rows(grid) * self.width * self.dtype.itemsize + _OVERHEAD

    def laid_out(self, features: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        """[t * h * w, row_width]: as a batch holds them."""
        if not self.tokens:
            return features
        t, h, w = grid
        out = features.new_zeros(t * h * w, self.row_width)
        out[: features.numel() // self.row_width] = features.reshape(-1, self.row_width)
        return out

    @property
    def row_width(self) -> int:
        """Of a batch's rows, which are as many as the patches whatever is kept: a token's lie in merge^2 rows."""
        return self.width // self.merge**2 if self.tokens else self.width


class FeatureStore:
    def __init__(self, folder: Path, shape: FeatureShape, room: int) -> None:
        """folder: named after all that the features of a picture follow from beside its pixels. room: bytes that this
        process may add."""
        self.folder, self.shape, self.room = folder, shape, room
        self.hits = self.made = 0  # pictures, since `counts`
        self.damaged = 0
        self._lock = threading.Lock()

    def path(self, medium: Medium) -> Path:
        name = key_of(medium)
        return self.folder / name[:2] / f"{name}{_END}"

    def read(self, medium: Medium) -> torch.Tensor | None:
        """None: not there, or not as it was written."""
        path = self.path(medium)
        try:
            with safe_open(str(path), framework="pt") as file:
                stored = (file.metadata() or {}).get("digest")
                found: torch.Tensor = file.get_tensor("features")
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ValueError, RuntimeError):
            self._remove(path)
            return None
        expected = (self.shape.rows(medium.grid), self.shape.width)
        if tuple(found.shape) != expected or found.dtype != self.shape.dtype or stored != _digest(found):
            self._remove(path)
            return None
        with self._lock:
            self.hits += 1
        return found

    def write(self, medium: Medium, features: torch.Tensor) -> bool:
        """False where there is no room, of this store or of the disk: the picture is computed again next time."""
        path, size = self.path(medium), self.shape.bytes(medium.grid)
        with self._lock:
            self.made += 1
            if size > self.room:
                return False
            self.room -= size
        content = save({"features": features.contiguous()}, metadata={"digest": _digest(features)})
        beside = path.with_name(f"{path.name}{_LEFT}{os.getpid()}-{threading.get_ident()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_bytes(content)
            os.replace(beside, path)
            return True
        except OSError:  # a full disk costs speed, not the run
            with contextlib.suppress(OSError):
                beside.unlink()
            with self._lock:
                self.room = 0
            return False

    def counts(self) -> dict[str, float]:
        """Since it was last asked: pictures whose features were read, and those that had to be computed."""
        with self._lock:
            counts = {"feature_cache_hits": float(self.hits), "feature_cache_made": float(self.made)}
            self.hits = self.made = 0
        return counts

    def _remove(self, path: Path) -> None:
        with self._lock:
            self.damaged += 1
        with contextlib.suppress(OSError):
            path.unlink()


def key_of(medium: Medium) -> str:
    """Of the bytes of a picture and of every choice that its pixels follow from."""
    described = medium.to_json()
    del described["places"]
    described |= {"version": cache_versions.VISION, "layout": layout() if medium.stamps else ""}
    described["decoders"] = decoders(bool(medium.frames))
    return hashlib.blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=20).hexdigest()


@cache
def decoders(video: bool) -> tuple[str, ...]:
    """What decodes and resizes: another release may round pixels of lossy files otherwise."""
    return tuple(f"{name} {version(name)}" for name in ("pillow", *(("av",) if video else ())))


def free_space(folder: Path, limit: int, needed: int, keep: str) -> int:
    """Bytes that may be added below `folder` without going past the limit. What was used longest ago, of other towers
    than `keep`, goes first, and what killed runs left behind."""
    files: list[tuple[float, int, Path]] = []
    used = 0
    for path in folder.glob(f"*/*/*{_END}*"):
        if not _OURS.fullmatch(path.relative_to(folder).as_posix()):  # another's file
            continue
        try:
            state = path.stat()
        except OSError:  # another process was first
            continue
        if _LEFT in path.name and not _alive(path.name):
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        used += state.st_size
        if path.parent.parent.name != keep:
            files.append((state.st_mtime, state.st_size, path))
    for _, size, path in sorted(files):
        if used + needed <= limit:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            used -= size
    return max(0, limit - used)


def _alive(name: str) -> bool:
    process = name.rpartition(_LEFT)[2].partition("-")[0]
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        return True
    return True


def _digest(features: torch.Tensor) -> str:
    raw: Any = features.contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(raw, digest_size=16).hexdigest()
