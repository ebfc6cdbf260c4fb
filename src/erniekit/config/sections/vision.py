"""Images and video. Declared for the recipes that carry it; not_yet_supported.py refuses the VL stages by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from erniekit.config.field import key

_VL = "vision"


@dataclass(frozen=True)
class VisionSection:
    multimodal: bool = key(False, "The model sees.", later=_VL)
    vision_model_name_or_path: str | None = key(None, "Its vision part, when apart.", later=_VL, path="one")
    vision_config: Mapping[str, Any] | None = key(
        None, "Values that replace those of its config.", fixed=True, later=_VL
    )
    freeze_config: tuple[str, ...] = key(
        (), "Parts that are not trained.", choices=("freeze_vision", "freeze_lm"), fixed=True, later=_VL
    )
    vit_lr_ratio: float | None = key(
        None, "Rate of a vision layer as a share of the next.", low=0, fixed=True, later=_VL
    )
    visual_ld: float | None = key(None, "Old name of vit_lr_ratio.", low=0, later=_VL)
    rope_3d: bool = key(True, "Positions in time, height and width.", fixed=True, later=_VL)
    text_dataset_path: tuple[str, ...] = key((), "Text mixed in.", commas=True, later=_VL, path="several")
    text_dataset_prob: tuple[float, ...] = key((), "Its shares.", low=0, commas=True, later=_VL)
    text_dataset_type: tuple[str, ...] = key((), "Its formats.", commas=True, later=_VL)
    modality_ratio: tuple[float, ...] = key(
        (), "Image and text micro-batches, e.g. [1,1].", low=0, fixed=True, later=_VL
    )
    modality_interleave: str = key("acc", "How they alternate.", fixed=True, later=_VL)
    variable_resolution: bool = key(False, "Native resolution.", fixed=True, later=_VL)
    max_pixels: int | None = key(None, "Most pixels per image.", low=1, fixed=True, later=_VL)
    min_pixels: int | None = key(None, "Fewest pixels per image.", low=1, fixed=True, later=_VL)
    video_max_pixels: int | None = key(None, "Most pixels per frame.", low=1, fixed=True, later=_VL)
    video_min_pixels: int | None = key(None, "Fewest pixels per frame.", low=1, fixed=True, later=_VL)
    video_fps: float = key(2.0, "Frames per second taken.", fixed=True, later=_VL)
    video_min_frames: int = key(16, "Fewest frames.", fixed=True, later=_VL)
    video_max_frames: int = key(480, "Most frames.", fixed=True, later=_VL)
    video_target_frames: int = key(-1, "Exactly so many; needs video_fps -1.", fixed=True, later=_VL)
    video_frames_sample: str = key(
        "middle", "Which frames.", choices=("middle", "rand", "leading"), fixed=True, later=_VL
    )
    render_timestamp: bool = key(False, "Draw the time on frames.", fixed=True, later=_VL)
    use_pic_id: bool = key(True, "Picture N: before each image.", fixed=True, later=_VL)
    chat_template: str | None = key("ernie_vl", "Template of VL conversations.", fixed=True, later=_VL)
    image_dtype: str = key("uint8", "How pixels are kept.", later=_VL)
    spatial_conv_size: int = key(2, "Patches merged per side.", low=1, fixed=True, later=_VL)
    im_prefix_length: int = key(64, "Image tokens.", low=1, later=_VL)
    image_token_len: int = key(64, "Image tokens.", low=1, later=_VL)
    adaptive_max_imgtoken_option: tuple[int, ...] = key((), "Image-token limits to choose from.", later=_VL)
    adaptive_max_imgtoken_rate: tuple[float, ...] = key((), "How often each is chosen.", later=_VL)
    one_sample_in_one_seq: bool = key(False, "No packing.", fixed=True, later=_VL)
    serialize_output: bool = key(True, "Of the old reader.", later=_VL)
    sft_shift_by_one: bool = key(False, "Shift labels in the reader.", later=_VL)
    add_sys_token: bool = key(False, "Mark system text.", fixed=True, later=_VL)
    drop_history_with_k: bool = key(False, "Drop old turns.", fixed=True, later=_VL)
    trigger_data_prob: float = key(0.5, "Of the old reader.", low=0, high=1, later=_VL)
    drop_untrainble_sample: bool = key(False, "Drop rows without trained tokens.", later=_VL)
    token_balance_loss: bool = key(False, "Weigh modalities by tokens.", fixed=True, later=_VL)
    balanced_image_preprocess: bool = key(False, "Even out images over ranks.", later=_VL)
    vit_second_fwd_batch_size: int | None = key(None, "Images per second vision pass.", later=_VL)
    packing_size: int = key(1, "Rows per pack of the OCR stage.", low=1, fixed=True, later=_VL)
    padding: bool = key(True, "Pad packs of the OCR stage.", fixed=True, later=_VL)
    sft_replace_ids: bool = key(False, "Of the OCR stage.", later=_VL)
    sft_image_normalize: bool = key(False, "Normalise pixels on the device, OCR stage.", later=_VL)
    sft_image_rescale: bool = key(False, "Rescale pixels on the device, OCR stage.", later=_VL)
