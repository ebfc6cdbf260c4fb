"""Images and video: what is read of them, how large, which parts are trained. Read by recipes/vision_data.py, build.py
and optimiser.py; keys marked `later` are of parts that this version does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from erniekit.config.field import key

_VL = "vision"


@dataclass(frozen=True)
class VisionSection:
    vision_model_name_or_path: str | None = key(None, "Its vision part, when apart.", later=_VL, path="one")
    vision_config: Mapping[str, Any] | None = key(
        None, "Values that replace those of its config.", fixed=True, later=_VL
    )
    freeze_config: tuple[str, ...] = key(
        (),
        "Parts of a model that sees which are not trained: its tower, its language model, its resampler.",
        choices=("freeze_vision", "freeze_lm", "freeze_resampler"),
        fixed=True,
    )
    vit_lr_ratio: float | None = key(
        None, "Learning rate of a layer of the tower as a share of the next one's.", low=0, fixed=True
    )
    visual_ld: float | None = key(None, "Old name of vit_lr_ratio.", low=0)
    rope_3d: bool = key(True, "Positions in time, height and width.", fixed=True, later=_VL)
    text_dataset_path: tuple[str, ...] = key((), "Text to train on between the pictures.", commas=True, path="several")
    text_dataset_prob: tuple[float, ...] = key((), "Share of each of these files.", low=0, commas=True, fixed=True)
    text_dataset_type: tuple[str, ...] = key((), "Their formats; detected when not given.", commas=True, fixed=True)
    modality_ratio: tuple[float, ...] = key(
        (), "Optimiser steps on pictures and on text, e.g. [1,1]: whole steps alternate.", low=0, fixed=True
    )
    variable_resolution: bool = key(
        False, "Under compat: erniekit, whether min_pixels and max_pixels apply; else they always do.", fixed=True
    )
    max_pixels: int | None = key(
        None,
        "Most pixels of a picture as the model sees it, 784 of them a token; the model's own when not given.",
        low=1,
        fixed=True,
    )
    min_pixels: int | None = key(None, "Fewest pixels of a picture; smaller ones are enlarged.", low=1, fixed=True)
    video_max_pixels: int | None = key(None, "Most pixels of a frame; as max_pixels when not given.", low=1, fixed=True)
    video_min_pixels: int | None = key(None, "Fewest pixels of a frame.", low=1, fixed=True)
    video_fps: float = key(2.0, "Frames a second that are seen.", fixed=True)
    video_min_frames: int = key(16, "Fewest frames of a video; -1: no bound.", fixed=True)
    video_max_frames: int = key(480, "Most frames of a video; -1: no bound.", fixed=True)
    video_target_frames: int = key(-1, "Exactly so many frames; needs video_fps -1.", fixed=True)
    video_frames_sample: str = key(
        "middle", "Which frame of each interval.", choices=("middle", "rand", "leading"), fixed=True
    )
    render_timestamp: bool = key(False, "Draw its time into each frame, as the released models expect.", fixed=True)
    use_pic_id: bool = key(True, '"Picture n:" before each picture; "Video n:" is always there.', fixed=True)
    chat_template: str = key(
        "ernie_vl",
        "How answers without a thought are written: an empty thought before the last (ernie_vl), or before each.",
        choices=("ernie_vl", "paddleformers_vl", "paddleformers_vl_nothink"),
        fixed=True,
    )
    vision_train_turns: str = key(
        "last",
        "Which answers of a conversation with pictures are trained, where none thinks: last, or all of them, each with "
        "an empty thought.",
        choices=("last", "all"),
        fixed=True,
    )
    video_positions: str = key(
        "erniekit",
        "Where text goes on behind a video: behind its largest position (ERNIEKit, vLLM), or behind its longer side "
        "(transformers).",
        choices=("erniekit", "transformers"),
        fixed=True,
    )
    exif_orientation: bool = key(True, "Turn pictures as their EXIF data say; ERNIEKit does not.", fixed=True)
    one_sample_in_one_seq: bool = key(
        False, "A video too long for max_seq_len loses resolution, then frames; packing is not affected.", fixed=True
    )
    drop_untrainble_sample: bool = key(
        False, "Under compat: erniekit, drop rows without trained tokens; else they are always dropped.", fixed=True
    )
    max_patches: int = key(
        0, "Most patches of all pictures in a pack, 4 of them a token: bounds the tower's memory. 0: no bound.", low=0,
        fixed=True,
    )  # fmt: skip
    media_check: str = key(
        "decode",
        "How media are checked before the first step: decode finds damage as bad rows; header is faster and leaves "
        "damage to the step that meets it, which then trains without that sample.",
        choices=("decode", "header"),
    )
    media_max_pixels: int = key(100_000_000, "A picture stored with more is a bad row, from its header.", low=1)
    media_max_bytes: int = key(512 << 20, "A file, or member of an archive, with more is a bad row.", low=1)
    media_max_frames: int = key(200_000, "A video stored with more frames is a bad row.", low=1)
    media_max_seconds: float = key(14_400.0, "A video that plays longer is a bad row.", low=0)
    media_timeout: float = key(8.0, "Seconds a decoder may compute without progress; then a bad row.", low=0.1)
    media_num_proc: int = key(0, "Processes that decode media for each rank; 0: as many as its cores, up to 8.", low=0)
    vision_feature_cache: str = key(
        "auto",
        "Keep the features of pictures on disk where the tower is frozen, so that each is decoded and computed once; "
        "auto: if those of all pictures fit vision_feature_cache_gb.",
        choices=("off", "auto", "on"),
    )
    vision_feature_cache_gb: float = key(
        100.0, "Most GB of kept features, of all models and runs together, in the data cache folder.", low=0
    )
    vision_proof: bool = key(
        True,
        "Keep one or two small rows of the data, with pictures, in each checkpoint and export: they prove later that "
        "pixels, ids and positions are made as in training.",
    )
    spatial_conv_size: int = key(2, "Patches merged per side.", low=1, fixed=True, later=_VL)
    token_balance_loss: bool = key(False, "Weigh modalities by tokens.", fixed=True, later=_VL)
    packing_size: int = key(1, "Rows per pack of the OCR stage.", low=1, fixed=True, later=_VL)
    padding: bool = key(True, "Pad packs of the OCR stage.", fixed=True, later=_VL)
    sft_replace_ids: bool = key(False, "Of the OCR stage.", later=_VL)
    sft_image_normalize: bool = key(False, "Normalise pixels on the device, OCR stage.", later=_VL)
    sft_image_rescale: bool = key(False, "Rescale pixels on the device, OCR stage.", later=_VL)
