"""The scales of FP8 training stored with a model's weights: fp8_scales.json, in checkpoints and in the final model.

Written and read by train/fp8_scales.py; export/ makes FP8 weights of a folder that has one.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from erniekit.checkpoint.shards import write_json
from erniekit.errors import CheckpointError
from erniekit.files import read_object
from erniekit.files.listed import has_file

FILE = "fp8_scales.json"


@dataclass(frozen=True)
class LayerScale:
    input_scale: float  # of what is multiplied by the layer's weight
    mean: float  # that the scale moves from once it is no longer each step's own
    block: int  # of the rotation; 0: none


@dataclass(frozen=True)
class SavedScales:
    steps: int  # that moved them
    highest: float  # what the largest number of a weight becomes
    layers: dict[str, LayerScale]  # by our names of linears and experts


def save(folder: Path, scales: SavedScales) -> None:
    """Numbers as text keep every bit: they are fp32, and are written as the doubles they are."""
    write_json(folder / FILE, asdict(scales))


def load(folder: Path) -> SavedScales | None:
    """None: the folder's weights were not trained so."""
    if not has_file(folder, FILE):
        return None
    raw = read_object(folder / FILE, CheckpointError)
    try:
        layers = {str(name): _layer(each) for name, each in raw["layers"].items()}
        scales = SavedScales(int(raw["steps"]), _positive(raw["highest"]), layers)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{FILE} does not hold scales of FP8 training: {error}",
            where=str(folder / FILE),
            fix="use another checkpoint, or fp8_force_clear_state: True to take new scales when resuming",
        ) from None
    return scales


def _layer(raw: Any) -> LayerScale:
    block = int(raw["block"])
    if block < 0 or block & (block - 1) or block > 1 << 12:
        raise ValueError(f"a rotation of {block}")
    return LayerScale(_positive(raw["input_scale"]), _positive(raw["mean"]), block)


def _positive(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or number <= 0:
        raise ValueError(f"{value!r} is not a scale")
    return number


def missing(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"no scales of FP8 training in {FILE} for every layer of this run",
        where=str(folder),
        fix="resume with the compute_type it was saved with, or fp8_force_clear_state: True to take new scales",
    )
