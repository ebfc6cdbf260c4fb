"""Every choice that decides what becomes of a row with pictures: one frozen value, part of the cache's key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from erniekit.data.media.frames import FrameRules
from erniekit.data.media.limits import MediaLimits
from erniekit.data.tokenizer import Tokenizer
from erniekit.errors import CheckpointError

PositionRule = Literal["erniekit", "transformers"]


@dataclass(frozen=True)
class VisionTemplate:
    """Where an answer that holds no thought gets an empty one, and what of it is trained."""

    block: Literal["last", "every", "none"] = "last"
    newline: bool = False  # before an empty thought
    block_trained: bool = False
    drop_thoughts: bool = False  # empty ones take their place
    train: Literal["last", "all"] = "last"  # answers; rows with reasoning train all
    train_ends: bool = True  # the end tokens of earlier answers, too


# chat_template: ERNIEKit's, which the releases' servers use; and the two of PaddleFormers 1.2.
TEMPLATES = {
    "ernie_vl": VisionTemplate(),
    "paddleformers_vl": VisionTemplate("every", newline=True, train="all", train_ends=False),
    "paddleformers_vl_nothink": VisionTemplate("every", train="all", train_ends=False),
}


@dataclass(frozen=True)
class VisionRules:
    patch: int = 14
    merge: int = 2
    temporal: int = 2  # frames that become one
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    video_min_pixels: int = 56 * 56
    video_max_pixels: int = 28 * 28 * 1280
    frames: FrameRules = field(default_factory=FrameRules)
    render_timestamp: bool = False
    use_pic_id: bool = True  # "Picture n:" before a picture
    upright: bool = True  # EXIF orientation is honoured
    template: VisionTemplate = field(default_factory=VisionTemplate)
    squeeze: bool = False  # one_sample_in_one_seq: a video too long loses resolution, then frames
    positions: PositionRule = "erniekit"
    drop_untrained: bool = True
    compat: bool = False  # ERNIEKit's reader, with the faults that change tokens
    check: Literal["decode", "header"] = "decode"  # of media, before the first step
    limits: MediaLimits = field(default_factory=MediaLimits)
    seed: int = 0  # of video_frames_sample: rand

    def cache_key(self) -> dict[str, Any]:
        """Every setting that changes the samples made from a row; limits of time and the depth of the check do not."""
        out = asdict(self)
        del out["check"], out["limits"]["timeout"], out["limits"]["total"]
        if self.render_timestamp:
            from erniekit.data.media.stamp import layout

            out["layout"] = layout()
        return out

    @classmethod
    def sizes_of(cls, preprocessor: Mapping[str, Any]) -> dict[str, int]:
        """The sizes of a model folder's preprocessor_config.json, under this class's names."""
        names = {
            "patch_size": "patch",
            "merge_size": "merge",
            "spatial_merge_size": "merge",
            "temporal_conv_size": "temporal",
            "temporal_patch_size": "temporal",
            "min_pixels": "min_pixels",
            "max_pixels": "max_pixels",
        }
        found = {names[key]: int(preprocessor[key]) for key in names if isinstance(preprocessor.get(key), int)}
        size = preprocessor.get("size")
        if isinstance(size, Mapping):  # transformers 5
            for key, name in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
                if isinstance(size.get(key), int):
                    found.setdefault(name, int(size[key]))
        for name in ("min_pixels", "max_pixels"):
            if name in found:
                found[f"video_{name}"] = found[name]
        return found


@dataclass(frozen=True)
class VisionTokens:
    placeholder: int
    image_start: int
    image_end: int
    video_start: int
    video_end: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> VisionTokens:
        names = ("IMAGE_PLACEHOLDER", "IMAGE_START", "IMAGE_END", "VIDEO_START", "VIDEO_END")
        ids = [tokenizer.special_ids.get(f"<|{name}|>") for name in names]
        if None in ids:
            missing = ", ".join(f"<|{name}|>" for name, id in zip(names, ids) if id is None)
            raise CheckpointError(
                f"the tokenizer has no {missing}", where=str(tokenizer.folder), fix="use that of an ERNIE-4.5-VL model"
            )
        return cls(*(id for id in ids if id is not None))

    @property
    def marks(self) -> tuple[int, ...]:
        return self.image_start, self.image_end, self.video_start, self.video_end
