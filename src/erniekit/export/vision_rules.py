"""How pictures and videos are seen: a run's keys and the model's own sizes as VisionRules. Read by training
(recipes/vision_data.py) and by the server, so that both see the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from erniekit.config import RunConfig
from erniekit.data.media.frames import FrameRules
from erniekit.data.media.limits import MediaLimits
from erniekit.data.settings_files import read_settings
from erniekit.data.vision.rules import TEMPLATES, VisionRules
from erniekit.errors import ConfigError

PREPROCESSOR = "preprocessor_config.json"


def vision_rules(cfg: RunConfig, model: Path | None) -> VisionRules:
    """model: the folder whose preprocessor_config.json has the sizes; without one ERNIE-4.5-VL's are taken."""
    v, compat = cfg.vision, cfg.compat.erniekit_rows
    sizes = (
        VisionRules.sizes_of(read_settings(model / PREPROCESSOR)) if model and (model / PREPROCESSOR).is_file() else {}
    )
    applies = v.variable_resolution or not compat
    pictures = _given(min_pixels=v.min_pixels, max_pixels=v.max_pixels) if applies else {}
    sizes |= pictures | {f"video_{name}": value for name, value in pictures.items()}
    sizes |= _given(video_min_pixels=v.video_min_pixels, video_max_pixels=v.video_max_pixels)
    template = TEMPLATES[v.chat_template]
    if v.vision_train_turns == "all" and template.block == "last":
        template = replace(template, block="every", train="all")
    rules = VisionRules(
        **sizes,
        frames=FrameRules(
            v.video_fps, v.video_min_frames, v.video_max_frames, v.video_target_frames, v.video_frames_sample
        ),
        render_timestamp=v.render_timestamp,
        use_pic_id=v.use_pic_id,
        upright=v.exif_orientation and not compat,
        template=template,
        squeeze=v.one_sample_in_one_seq,
        positions=v.video_positions,  # type: ignore[arg-type]
        drop_untrained=v.drop_untrainble_sample or not compat,
        compat=compat,
        check=v.media_check,  # type: ignore[arg-type]
        limits=MediaLimits(
            v.media_max_pixels, v.media_max_bytes, v.media_max_frames, v.media_max_seconds, v.media_timeout
        ),
        seed=cfg.train.seed,
    )
    for name, low, high in (("pixels", rules.min_pixels, rules.max_pixels),
                            ("video pixels", rules.video_min_pixels, rules.video_max_pixels)):  # fmt: skip
        if low > high:
            raise ConfigError(
                f"fewest {name} are {low:,}, most {high:,}",
                where="min_pixels, max_pixels, video_min_pixels, video_max_pixels",
                fix="the model's own bounds hold where a key is not given: set both",
            )
    return rules


def _given(**keys: int | None) -> dict[str, int]:
    return {name: value for name, value in keys.items() if value is not None}
