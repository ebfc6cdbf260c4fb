"""The recorded rows with pictures (tests/data/paddle-vl), the rules they were made by, and a model they can train."""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.data.media.decode import MediaHeader, Medium, ReadHeader, ReadPatches
from erniekit.data.media.frames import FrameRules
from erniekit.data.media.limits import MediaLimits
from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from erniekit.data.vision.rules import VisionRules
from erniekit.data.vision.vision_row import GivenMedium

FOLDER = Path(__file__).resolve().parents[1] / "data" / "paddle-vl"
MEDIA = FOLDER / "media"
LIMITS = MediaLimits()


@cache
def recorded() -> dict[str, Any]:
    return json.loads((FOLDER / "data.json").read_text())


def tiny_seeing(target: Path) -> Path:
    """The recorded tiny ERNIE-4.5-VL with its tokenizer."""
    target.mkdir(parents=True, exist_ok=True)
    for source in ("vl_hf", "tokenizer"):
        for file in (FOLDER / source).iterdir():
            shutil.copyfile(file, target / file.name)
    return target


@cache
def new_stack() -> dict[str, Any]:
    return json.loads((FOLDER / "new_stack.json").read_text())


@cache
def rows() -> dict[str, dict[str, Any]]:
    lines = (FOLDER / "rows.jsonl").read_text().splitlines()
    return {row["name"]: row for row in map(json.loads, lines)}


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(FOLDER / "tokenizer")


def rules(**changed: Any) -> VisionRules:
    """ERNIEKit's, for the arguments of the recording; `changed` are its names."""
    a = {**recorded()["args"], **changed}
    keys = ("fps", "min_frames", "max_frames", "target_frames", "frames_sample")
    return VisionRules(
        min_pixels=a["min_pixels"] or 56 * 56,
        max_pixels=a["max_pixels"] or 28 * 28 * 1280,
        video_min_pixels=a["video_min_pixels"] or 56 * 56,
        video_max_pixels=a["video_max_pixels"] or 28 * 28 * 1280,
        frames=FrameRules(*(a[f"video_{key}"] for key in keys)),
        render_timestamp=a["render_timestamp"],
        use_pic_id=a["use_pic_id"],
        upright=False,
        squeeze=a["one_sample_in_one_seq"],
        drop_untrained=a["drop_untrainble_sample"],
        compat=True,
    )


def header(given: GivenMedium, index: int) -> MediaHeader:
    return ReadHeader(given.sources[index], given.video and not given.stamps, LIMITS).work(lambda: None)


def patches(media: tuple[Medium, ...]) -> np.ndarray:
    return np.concatenate([ReadPatches(medium, LIMITS).work(lambda: None) for medium in media])


def sha(patches: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(patches).tobytes()).hexdigest()[:32]
