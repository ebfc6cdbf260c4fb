"""Stands in for the file of this name in the `-PT` releases, which are not at hand: the processor, as vLLM calls it.

Pixels are resized and cut into patches by transformers' own class for these models, not by erniekit. Copied into a
model folder by support/vl_release_folder.py, and run there by vLLM alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature, ProcessorMixin
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import Ernie4_5_VLMoeImageProcessorPil


class Ernie4_5_VLImageProcessor:
    """Patches as bytes: vLLM normalises them by the fields of this object."""

    model_input_names = ("images", "grid_thw")

    def __init__(self, fields: dict[str, Any]) -> None:
        theirs = Ernie4_5_VLMoeImageProcessorPil
        self.size = {"min_pixels": fields["min_pixels"], "max_pixels": fields["max_pixels"]}
        self.image_mean = fields.get("image_mean", theirs.image_mean)
        self.image_std = fields.get("image_std", theirs.image_std)
        self.rescale_factor = 1 / 255
        edges = {"shortest_edge": self.size["min_pixels"], "longest_edge": self.size["max_pixels"]}
        self._patches = theirs(size=edges, do_rescale=False, do_normalize=False)

    def patches(self, frames: list[Image.Image]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of frames of one size: one picture, or a video of an even number."""
        found = self._patches(frames, return_tensors="pt")
        grid = found["image_grid_thw"][:1].clone()
        grid[0, 0] = len(frames)
        return found["pixel_values"].round().to(torch.uint8), grid


class Ernie4_5_VLProcessor(ProcessorMixin):
    spatial_conv_size = temporal_conv_size = 2

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer, self.chat_template = image_processor, tokenizer, None

    @classmethod
    def from_pretrained(cls, folder: str, tokenizer: Any = None, **_: Any) -> Ernie4_5_VLProcessor:  # type: ignore[override]
        fields = json.loads(Path(folder, "preprocessor_config.json").read_text())
        return cls(Ernie4_5_VLImageProcessor(fields), tokenizer)

    def __call__(self, text: Any, images: Any = (), videos: Any = (), **_: Any) -> BatchFeature:  # type: ignore[override]
        """vLLM puts placeholders into the prompt itself, and takes from here pixels alone."""
        clips = [np.asarray(clip[0] if isinstance(clip, tuple) else clip) for clip in videos]
        media = [[picture.convert("RGB")] for picture in images] + [list(map(Image.fromarray, clip)) for clip in clips]
        seen = [self.image_processor.patches(frames) for frames in media]
        ids = [self.tokenizer.encode(line, add_special_tokens=False) for line in text]
        return BatchFeature(
            {
                "input_ids": torch.tensor(ids),
                "images": torch.cat([patches for patches, _ in seen]) if seen else None,
                "grid_thw": torch.cat([grid for _, grid in seen]) if seen else None,
            }
        )
