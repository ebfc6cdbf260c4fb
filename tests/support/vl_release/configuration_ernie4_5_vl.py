"""Stands in for the file of this name in the `-PT` releases, which are not at hand: the flat config.json as an object.

Copied into a model folder by support/vl_release_folder.py, and run there by vLLM alone.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class Ernie4_5_VLVisionConfig(PretrainedConfig):
    base_config_key = "vision_config"


class Ernie4_5_VLConfig(PretrainedConfig):
    model_type = "ernie4_5_moe_vl"

    def __init__(self, vision_config: dict[str, Any] | None = None, **fields: Any) -> None:
        self.vision_config = Ernie4_5_VLVisionConfig(**(vision_config or {}))
        super().__init__(**fields)
