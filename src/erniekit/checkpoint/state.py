"""A run's state besides its weights: counters, random generators, and the promise its config made.

Written into every checkpoint as state.json by train/save.py; read back on resume.
"""

from __future__ import annotations

import base64
import json
import random
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from erniekit.checkpoint.manifest import unreadable
from erniekit.checkpoint.shards import write_json
from erniekit.devices.base import Device
from erniekit.errors import CheckpointError
from erniekit.files import read_object
from erniekit.files.listed import Listed

FILE = "state.json"


@dataclass
class TrainState:
    step: int = 0  # optimiser updates requested, skipped ones included
    packs: int = 0  # global packs consumed: the one integer that places the data order
    tokens: int = 0  # real tokens seen, padding apart
    trained_tokens: int = 0
    updates: int = 0  # optimiser updates done (Adam's own count)
    skipped_steps: int = 0
    bad_in_a_row: int = 0
    rollbacks: int = 0
    loss_sum: float = 0.0  # of step losses, for the mean over the run
    best_metric: float | None = None
    best_step: int | None = None
    evals_without_gain: int = 0
    evaluated_step: int = -1  # whose evaluation is in the three above; a checkpoint may come before its own
    promise: dict[str, Any] = field(default_factory=dict)  # config values a resume must not change
    written: dict[str, int] = field(default_factory=dict)  # dates (ns) of data files too large to be compared whole


def _pack(value: torch.Tensor) -> str:
    return base64.b64encode(value.cpu().numpy().tobytes()).decode()


def _unpack(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())


def random_states(device: Device) -> dict[str, Any]:
    legacy: Any = np.random.get_state()
    kind, keys, position, has_gauss, cached = legacy
    states: dict[str, Any] = {
        "torch": _pack(torch.get_rng_state()),
        "python": json.loads(json.dumps(random.getstate())),
        "numpy": [
            kind,
            base64.b64encode(keys.tobytes()).decode(),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }
    on_device = device.rng_state()
    if on_device is not None:
        states[device.type] = _pack(on_device)
    return states


def restore_random(states: dict[str, Any], device: Device) -> None:
    try:
        torch.set_rng_state(_unpack(states["torch"]))
        version, internal, gauss = states["python"]
        random.setstate((version, tuple(internal), gauss))
        kind, keys, position, has_gauss, cached = states["numpy"]
        np.random.set_state((kind, np.frombuffer(base64.b64decode(keys), dtype=np.uint32), position, has_gauss, cached))
        if device.type in states:
            device.set_rng_state(_unpack(states[device.type]))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"{FILE} holds random states that cannot be used: {error}", where=FILE, fix="resume from another checkpoint"
        ) from None


def save(folder: Path, state: TrainState, extra: dict[str, Any]) -> None:
    """`extra` holds the random states, taken at the same moment as the weights."""
    write_json(folder / FILE, {**asdict(state), **extra})


def load(folder: Path) -> tuple[TrainState, dict[str, Any]]:
    path = folder / FILE
    if not Listed(folder).allows(FILE):
        raise CheckpointError(f"MANIFEST.json lists no {FILE}", where=str(folder), fix="resume from another checkpoint")
    try:
        raw = read_object(path, CheckpointError)
    except OSError as error:
        raise unreadable(path, error) from error
    types = {f.name: f.type for f in fields(TrainState)}
    for name, kind in types.items():
        if name in raw and not _fits(raw[name], str(kind)):
            raise CheckpointError(
                f"{FILE} has {str(raw[name])[:60]!r} for {name!r}, a value of kind {kind} is needed",
                where=f"{path}, key {name}",
                fix="resume from another checkpoint",
            )
    if not isinstance(raw.setdefault("random", {}), dict):
        raise CheckpointError(
            f"{FILE} has no random states", where=f"{path}, key random", fix="resume from another checkpoint"
        )
    numbers = raw.setdefault("optimizer", {})
    if not isinstance(numbers, dict) or not all(_fits(value, "float") for value in numbers.values()):
        raise CheckpointError(
            f"{FILE} has no numbers of the optimiser",
            where=f"{path}, key optimizer",
            fix="resume from another checkpoint",
        )
    return TrainState(**{k: v for k, v in raw.items() if k in types}), raw


def _fits(value: Any, kind: str) -> bool:
    """Whether a JSON value is of an annotation of TrainState."""
    if value is None:
        return kind.endswith("None")
    kind = kind.removesuffix(" | None")
    if kind.startswith("dict"):
        return isinstance(value, dict)
    if isinstance(value, bool):
        return False
    return isinstance(value, int) and -1 <= value < 1 << 63 if kind == "int" else isinstance(value, int | float)
