"""The result of preprocessing a row, stage by stage, as digests: a checkpoint keeps them, and its readers compute them
again. The first stage that differs is the cause; later ones follow from it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from erniekit.data.media.decode import Medium, ReadPatches
from erniekit.data.media.limits import MediaLimits
from erniekit.data.types import Sample

# In the order of the work; each is recognised by what only it can change.
STAGES = ("file", "size", "frames", "decode", "time stamp", "resize", "template", "position")


@dataclass(frozen=True)
class ProveMedium:
    """For a worker process: digests of a medium's pixels after each step."""

    medium: Medium
    limits: MediaLimits

    def work(self, beat: Callable[[], None]) -> dict[str, str]:
        return {name: _digest(pixels) for name, pixels in ReadPatches(self.medium, self.limits).stages().items()}


def proof_of(
    sample: Sample, limits: MediaLimits, header_of: Callable[[ProveMedium], dict[str, str]] | None = None
) -> dict[str, str]:
    """Of a sample with its media. run: decodes them; here, where not given."""
    assert sample.media is not None
    media: Sequence[Medium] = sample.media.sources
    found: dict[str, Any] = {
        "file": [medium.digests for medium in media],
        "size": [medium.grid for medium in media],
        "frames": [medium.frames for medium in media],
        "template": sample.ids,
        "position": sample.media.positions,
    }
    prove = header_of or (lambda work: work.work(lambda: None))
    steps = [prove(ProveMedium(medium, limits)) for medium in media]
    for name in ("decode", "time stamp", "resize"):
        found[name] = [step[name] for step in steps]
    return {name: _digest(found[name]) for name in STAGES}


def first_difference(stored: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """The name of the stage; None where all are the same."""
    return next((name for name in STAGES if stored.get(name) != found.get(name)), None)


def _digest(value: Any) -> str:
    out = hashlib.blake2b(digest_size=8)
    _add(out, value)
    return out.hexdigest()


def _add(out: Any, value: Any) -> None:
    if isinstance(value, np.ndarray):
        out.update(f"{value.dtype.str}{value.shape}".encode())
        out.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, list | tuple):
        out.update(f"[{len(value)}".encode())
        for item in value:
            _add(out, item)
    else:
        out.update(repr(value).encode())
