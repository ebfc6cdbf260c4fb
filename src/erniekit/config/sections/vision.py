"""Images and video: what is read of them, how large, which parts are trained. Read by recipes/vision_data.py,
vision_features.py and optimiser.py; keys marked `not_yet` are of parts that this version does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from erniekit.config.field import key

_VL = "vision"


@dataclass(frozen=True)
class VisionSection:
    vision_model_name_or_path: str | None = key(
        None, "Vision part of the model, if in a separate folder.", not_yet=_VL, path="one"
    )
    vision_config: Mapping[str, Any] | None = key(
        None, "Values that replace those of the vision config.", fixed=True, not_yet=_VL
    )
    freeze_config: tuple[str, ...] = key(
        (),
        "Parts of a vision model that are not trained: tower, language model, resampler.",
        choices=("freeze_vision", "freeze_lm", "freeze_resampler"),
        fixed=True,
    )
    vit_lr_ratio: float | None = key(None, "Layer-wise learning-rate decay of the vision tower.", low=0, fixed=True)
    visual_ld: float | None = key(None, "Old name of vit_lr_ratio.", low=0)
    rope_3d: bool = key(True, "Positions in time, height and width.", fixed=True, not_yet=_VL)
    text_dataset_path: tuple[str, ...] = key(
        (), "Text files, trained on between steps with images.", commas=True, path="several"
    )
    text_dataset_prob: tuple[float, ...] = key((), "Share of each text file.", low=0, commas=True, fixed=True)
    text_dataset_type: tuple[str, ...] = key(
        (), "Data formats of the text; default: detected.", commas=True, fixed=True
    )
    modality_ratio: tuple[float, ...] = key(
        (), "Steps on images and on text, e.g. [1,1]: whole steps alternate.", low=0, fixed=True
    )
    variable_resolution: bool = key(
        False, "Under compat: erniekit, whether min_pixels and max_pixels apply; otherwise they always do.", fixed=True
    )
    max_pixels: int | None = key(
        None,
        "Maximum pixels of an image after resizing, 784 per token; default: the model's own.",
        low=1,
        fixed=True,
    )
    min_pixels: int | None = key(None, "Minimum pixels of an image; smaller ones are enlarged.", low=1, fixed=True)
    video_max_pixels: int | None = key(None, "Maximum pixels of a frame; default: max_pixels.", low=1, fixed=True)
    video_min_pixels: int | None = key(None, "Minimum pixels of a frame.", low=1, fixed=True)
    video_fps: float = key(2.0, "Sampled frames per second.", fixed=True)
    video_min_frames: int = key(16, "Minimum frames of a video; -1 = no limit.", fixed=True)
    video_max_frames: int = key(480, "Maximum frames of a video; -1 = no limit.", fixed=True)
    video_target_frames: int = key(-1, "Exact number of frames; needs video_fps -1.", fixed=True)
    video_frames_sample: str = key(
        "middle", "Which frame of each interval is sampled.", choices=("middle", "rand", "leading"), fixed=True
    )
    render_timestamp: bool = key(False, "Draw its time into each frame, as the released models expect.", fixed=True)
    use_pic_id: bool = key(True, '"Picture n:" before each picture; "Video n:" is always there.', fixed=True)
    chat_template: str = key(
        "ernie_vl",
        "Answers without reasoning: an empty reasoning part before the last one (ernie_vl), or before each.",
        choices=("ernie_vl", "paddleformers_vl", "paddleformers_vl_nothink"),
        fixed=True,
    )
    vision_train_turns: str = key(
        "last",
        "Which answers of a conversation with images are trained if none has reasoning: last, or all, each with an "
        "empty reasoning part.",
        choices=("last", "all"),
        fixed=True,
    )
    video_positions: str = key(
        "erniekit",
        "Position of the text after a video: after its largest position (ERNIEKit, vLLM), or after its longer side "
        "(transformers).",
        choices=("erniekit", "transformers"),
        fixed=True,
    )
    exif_orientation: bool = key(True, "Rotate images by their EXIF orientation; ERNIEKit does not.", fixed=True)
    one_sample_in_one_seq: bool = key(
        False, "A video too long for max_seq_len loses resolution, then frames; packing is not affected.", fixed=True
    )
    drop_untrainble_sample: bool = key(
        False, "Under compat: erniekit, drop rows without trained tokens; otherwise always dropped.", fixed=True
    )
    max_patches: int = key(
        0, "Maximum image patches per pack, 4 per token: limits the tower's memory. 0 = no limit.", low=0,
        fixed=True,
    )  # fmt: skip
    media_check: str = key(
        "decode",
        "How media are checked before the first step: decode reports damaged files as bad rows; header is faster, and "
        "a damaged sample is left out of its step.",
        choices=("decode", "header"),
    )
    media_max_pixels: int = key(100_000_000, "An image file with more pixels is a bad row (by its header).", low=1)
    media_max_bytes: int = key(512 << 20, "A file or archive member with more bytes is a bad row.", low=1)
    media_max_frames: int = key(200_000, "A video file with more frames is a bad row.", low=1)
    media_max_seconds: float = key(14_400.0, "A longer video is a bad row.", low=0)
    media_timeout: float = key(8.0, "Seconds a decoder may run without progress; then a bad row.", low=0.1)
    media_num_proc: int = key(0, "Decoder processes per rank; 0 = its number of cores, up to 8.", low=0)
    vision_feature_cache: str = key(
        "auto",
        "Cache image features on disk if the tower is frozen, so that each image is decoded and encoded once; auto = "
        "if the features of all images fit into vision_feature_cache_gb.",
        choices=("off", "auto", "on"),
    )
    vision_feature_cache_gb: float = key(
        100.0, "Maximum GB of cached features, for all models and runs together, in the data cache folder.", low=0
    )
    vision_proof: bool = key(
        True,
        "Keep one or two small rows of the data, with images, in each checkpoint, not in exports: export and eval "
        "use them to prove that pixels, ids and positions are made as in training.",
    )
    spatial_conv_size: int = key(2, "Patches merged per side.", low=1, fixed=True, not_yet=_VL)
    token_balance_loss: bool = key(False, "Weight modalities by tokens.", fixed=True, not_yet=_VL)
    packing_size: int = key(1, "Rows per pack of the OCR stage.", low=1, fixed=True, not_yet=_VL)
    padding: bool = key(True, "Pad packs of the OCR stage.", fixed=True, not_yet=_VL)
    sft_replace_ids: bool = key(False, "Of the OCR stage.", not_yet=_VL)
    sft_image_normalize: bool = key(False, "Normalise pixels on the device, OCR stage.", not_yet=_VL)
    sft_image_rescale: bool = key(False, "Rescale pixels on the device, OCR stage.", not_yet=_VL)
