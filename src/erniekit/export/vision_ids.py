"""The ids a server needs in config.json of a vision model, from its tokenizer where the base does not have them.

Called by export/run.py. Without them vLLM takes the marks around pictures for text and sends them to text experts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from erniekit.data.tokenizer import has_tokenizer, load_tokenizer
from erniekit.data.vision.rules import VisionTokens
from erniekit.models.config import DecoderConfig

_VIDEO = "<|VIDEO_PLACEHOLDER|>"


def with_token_ids(config: DecoderConfig, tokenizer: Path) -> DecoderConfig:
    """config: of a vision-language model. The same where nothing is missing, and where the folder has no tokenizer."""
    v = config.vision
    assert v is not None
    if None not in (v.image_id, v.video_id, v.image_bounds, v.video_bounds) or not has_tokenizer(tokenizer):
        return config
    found = load_tokenizer(tokenizer, config.vocab_size)
    tokens = VisionTokens.of(found)
    return replace(
        config,
        vision=replace(
            v,
            image_id=tokens.placeholder if v.image_id is None else v.image_id,
            video_id=found.special_ids.get(_VIDEO) if v.video_id is None else v.video_id,
            image_bounds=v.image_bounds or (tokens.image_start, tokens.image_end),
            video_bounds=v.video_bounds or (tokens.video_start, tokens.video_end),
        ),
    )
