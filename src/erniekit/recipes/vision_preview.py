"""Rows with pictures for `erniekit data preview`: tokens as the model sees them, and a thumbnail of each picture with
the number of its tokens. Called by preview.py; imports no torch."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from erniekit.config import RunConfig
from erniekit.data.assemble import Dropped
from erniekit.data.formats import Raw, detect, parsed
from erniekit.data.formats.fields import BadRow
from erniekit.data.media.decode import Medium, ReadPatches
from erniekit.data.media.limits import MediaError, MediaLimits
from erniekit.data.media.worker import MediaPool
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import IGNORE, RowProblem, Sample
from erniekit.data.vision.layout import headers_from, tokens_of
from erniekit.data.vision.read import read_vision_row
from erniekit.data.vision.rules import VisionRules, VisionTokens
from erniekit.data.vision.tokens import VisionAssembler
from erniekit.export.vision_rules import vision_rules

SIDE = 160  # pixels of a thumbnail
MOST_SHOWN = 4  # thumbnails of a row
MOST_PIECES = 2000
READ, TRAINED = 0, 1  # as preview.py's


@dataclass(frozen=True)
class ReadThumbnail:
    """The first frame as the model sees it, small, as a JPEG; in a worker process."""

    medium: Medium
    limits: MediaLimits

    def work(self, beat: Callable[[], None]) -> bytes:
        from PIL import Image

        m = self.medium
        first = replace(m, frames=m.frames[:1], stamps=m.stamps[:1], places=m.places[:1], digests=m.digests[:1])
        picture = Image.fromarray(ReadPatches(first, self.limits).stages()["resize"][0])
        picture.thumbnail((SIDE, SIDE))
        out = io.BytesIO()
        picture.save(out, "JPEG", quality=80)
        return out.getvalue()


class VisionPreview:
    """Rows of one file; its worker process ends with `close`, or with this process."""

    def __init__(
        self, cfg: RunConfig, file: Path, format: str | None, tokenizer: Tokenizer, model: Path | None
    ) -> None:
        self.cfg, self.file, self.tokenizer = cfg, file, tokenizer
        self.rules: VisionRules = vision_rules(cfg, model)
        found = detect(file) if format is None else None
        self.format = format or (found.format if found else "")
        self._assembler = VisionAssembler(tokenizer, self.rules, cfg.data.train_thinking)  # type: ignore[arg-type]
        self._place = VisionTokens.of(tokenizer).placeholder
        self._pool = MediaPool(1, self.rules.limits)
        self._header = headers_from(self._pool, self.rules.limits)

    def row(self, line: int, raw: Raw) -> tuple[list[tuple[str, int]], str, tuple[str, ...], dict[str, Any]]:
        """Pieces, what is wrong, fields that are not used; tokens and pictures."""
        folder = self.file.absolute().parent
        read = lambda value: read_vision_row(value, folder, self.format, self.rules.compat)  # noqa: E731
        row = parsed(raw, line, str(self.file), read)
        if isinstance(row, RowProblem):
            return [], row.reason, (), {}
        try:
            made = self._assembler.sample(row, self.cfg.data.max_seq_len, self.cfg.data.overlong, self._header)
            if isinstance(made, Dropped):
                return [], made.reason, row.unused, {}
            sample = made.sample
            shown = self._media(sample)
        except (BadRow, MediaError) as error:
            return [], error.reason, row.unused, {}
        counts = {"tokens": len(sample.ids) + 1, "trained": int((sample.labels != IGNORE).sum())}
        return self._pieces(sample, shown)[:MOST_PIECES], "", row.unused, {**counts, "media": shown}

    def _media(self, sample: Sample) -> list[dict[str, Any]]:
        out = []
        for number, medium in enumerate(sample.media.sources if sample.media is not None else ()):
            t, h, w = medium.grid
            entry = {
                "kind": "video" if medium.video else "picture",
                "name": Path(medium.places[0].name).name,
                "tokens": tokens_of(medium, self.rules),
                "size": [w * medium.patch, h * medium.patch],
                "frames": t,
            }
            if number < MOST_SHOWN and self._is_here(medium):
                content = self._pool.run(ReadThumbnail(medium, self.rules.limits), medium.places[0].name)
                entry["thumbnail"] = "data:image/jpeg;base64," + base64.b64encode(content).decode()
            out.append(entry)
        return out

    def _is_here(self, medium: Medium) -> bool:
        """In the row itself or below the dataset's folder: a row must not make the page show files from elsewhere."""
        home = Path(os.path.realpath(self.file)).parent
        return all(place.content or home in Path(os.path.realpath(place.path)).parents for place in medium.places)

    def _pieces(self, sample: Sample, media: list[dict[str, Any]]) -> list[tuple[str, int]]:
        """A picture is one piece, whatever its tokens."""
        ids, labels = sample.ids.tolist(), sample.labels.tolist()
        if labels[-1] != IGNORE:
            ids = [*ids, labels[-1]]
        parts = [READ, *(TRAINED if label != IGNORE else READ for label in labels)]
        out: list[tuple[str, int]] = []
        left = iter(media)
        at = 0
        for text, part, id in zip(self.tokenizer.pieces(ids), parts, ids):
            if id != self._place:
                out.append((text, part))
            elif at > 0:
                at -= 1
            else:
                shown = next(left)
                out.append((f"[{shown['kind']} {shown['name']}: {shown['tokens']} tokens]", READ))
                at = shown["tokens"] - 1
        return out
