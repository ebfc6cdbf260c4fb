"""A request's messages -> prompt and pixels, by the code that makes training samples. For the demo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.data.formats.fields import BadRow
from erniekit.data.media.decode import ReadPatches
from erniekit.data.media.limits import MediaError
from erniekit.data.media.worker import MediaPool
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.vision.chat_rows import read_prompt
from erniekit.data.vision.layout import headers_from
from erniekit.data.vision.rules import VisionRules
from erniekit.data.vision.tokens import VisionAssembler, VisionPrompt
from erniekit.errors import DataError


@dataclass(frozen=True)
class SeenPrompt:
    prompt: VisionPrompt
    patches: np.ndarray  # uint8 [P, 3 * patch * patch]


class PromptReader:
    """folder: where relative paths in messages start; None: only `data:` URLs are opened."""

    def __init__(self, tokenizer: Tokenizer, rules: VisionRules, pool: MediaPool, folder: Path | None = None) -> None:
        self.rules, self.pool, self.folder = rules, pool, folder
        self._assembler = VisionAssembler(tokenizer, rules)
        self._header = headers_from(pool, rules.limits)

    def read(self, messages: Sequence[Any], thinking: bool | None = None) -> SeenPrompt:
        """DataError, in one line, where a message or a picture cannot be used."""
        try:
            prompt = self._assembler.prompt(read_prompt(messages, self.folder), self._header, thinking)
            patches = [self.pool.run(ReadPatches(m, self.rules.limits), m.places[0].name) for m in prompt.media.sources]
        except (BadRow, MediaError) as error:
            raise DataError(
                error.reason, where="messages", fix="send PNG, JPEG or WebP pictures as data: URLs"
            ) from None
        width = 3 * self.rules.patch**2
        return SeenPrompt(prompt, np.concatenate([np.zeros((0, width), np.uint8), *patches]))
