"""A tiny model folder that sees, and prompts with the recorded pictures, for everything that serves."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.data.tokenizer import Tokenizer
from erniekit.data.vision.chat_rows import read_prompt
from erniekit.data.vision.rules import VisionRules
from erniekit.data.vision.tokens import VisionAssembler
from erniekit.serve.engines.vision_input import PromptVision
from erniekit.serve.vision_prompt import prompt_vision
from support import recorded_vision, seen

SMALL = {"max_pixels": 9408, "video_max_pixels": 9408}  # 12 tokens a picture or pair of frames


def seeing_folder(target: Path) -> Path:
    target.mkdir(parents=True)
    for file in (*(recorded_vision.FOLDER / "vl_hf").iterdir(), *(seen.FOLDER / "tokenizer").iterdir()):
        shutil.copy(file, target)
    return target


def inline(name: str, kind: str = "image/png") -> str:
    return f"data:{kind};base64," + base64.b64encode((seen.MEDIA / name).read_bytes()).decode()


def picture(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def video(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def prompt_of(
    *messages: dict[str, Any], rules: VisionRules | None = None, tokenizer: Tokenizer | None = None
) -> tuple[list[int], PromptVision]:
    """Ids and pictures of a request, read in this process."""
    rules, tokenizer = rules or VisionRules(**SMALL), tokenizer or seen.tokenizer()
    asked = VisionAssembler(tokenizer, rules).prompt(read_prompt(messages), seen.header)
    patches: list[np.ndarray | None] = [seen.patches((medium,)) for medium in asked.media.sources]
    return asked.ids.tolist(), prompt_vision(asked, patches, tokenizer, rules)
