"""Packs with pictures -> Batch: patches decoded by worker processes, positions in three dimensions, modality.

A BatchLoader calls it like data/collate.py's function. What cannot be decoded any more (a file that changed or hangs)
leaves its sample in place, without loss and with blank pixels, and is reported with file and line: shapes, and with
them the other ranks, do not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from erniekit import log
from erniekit.data.collate import collate
from erniekit.data.media.decode import Medium, ReadPatches
from erniekit.data.media.limits import MediaError, MediaLimits
from erniekit.data.media.worker import MediaPool
from erniekit.data.types import IGNORE, TEXT, Batch, Pack, RowProblem, Sample, Unseen, Vision
from erniekit.data.vision.features import FeatureStore
from erniekit.data.vision.rules import VisionRules, VisionTokens


class VisionCollate:
    def __init__(
        self,
        tokens: VisionTokens,
        limits: MediaLimits,
        processes: int,
        zero_padding: bool = False,
        change: Callable[[Pack], Pack] | None = None,
        decode: bool = True,
        rules: VisionRules | None = None,
        rows: Callable[..., Batch] = collate,
    ) -> None:
        """zero_padding: padding is at position 0, as in ERNIEKit; nothing reads it. change: of packs, before anything.
        decode: off on ranks that do not see, such as later pipeline stages: they have the rest of a batch. rules: that
        its samples were laid out by. rows: what makes a batch of packs without their pictures; stage DPO has its
        own."""
        self.tokens, self.limits, self.zero_padding, self.change = tokens, limits, zero_padding, change
        self.decode, self.rules, self.rows = decode, rules, rows
        self.store: FeatureStore | None = None  # of pictures whose features are kept; set before training
        self.pool = MediaPool(processes, limits)
        self.failed: list[RowProblem] = []
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="erniekit-media")

    def __call__(self, packs: Sequence[Pack], **padding: Any) -> Batch:
        if self.change is not None:
            packs = [self.change(pack) for pack in packs]
        media = [medium for pack in packs for sample in pack.samples for medium in _media(sample) if self.decode]
        patches = list(self._threads.map(self._patches, media))
        blank = {id(medium) for medium, found in zip(media, patches) if isinstance(found, MediaError)}
        if blank:
            packs = [replace(pack, samples=tuple(_muted(s, blank) for s in pack.samples)) for pack in packs]
            self._report(media, patches)
        batch = self.rows(packs, **padding)
        shape = batch.input_ids.shape
        places = batch.positions.numpy()[..., None].repeat(3, -1)
        modality, seen, picture_labels = np.full(shape, TEXT, np.uint8), False, 0
        for row, pack in enumerate(packs):
            at = 0
            for sample in pack.samples:
                end = at + len(sample.ids)
                if sample.media is not None:
                    places[row, at:end], modality[row, at:end] = sample.media.positions, sample.media.modality
                    seen = seen or bool(sample.media.sources)
                    picture_labels += int((sample.labels != IGNORE).sum()) if sample.media.sources else 0
                at = end
            if self.zero_padding:
                places[row, at:] = 0
        return replace(
            batch,
            positions=torch.from_numpy(places),
            modality=torch.from_numpy(modality) if seen else None,
            vision=self._vision(batch, media, patches) if self.decode or not seen else self._nothing(packs),
            picture_labels=picture_labels,
        )

    def __enter__(self) -> VisionCollate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.pool.close()

    def _patches(self, medium: Medium) -> torch.Tensor | np.ndarray | MediaError:
        """Pixels; or the features kept of them, as rows of a batch."""
        if self.store is not None and (kept := self.store.read(medium)) is not None:
            return self.store.shape.laid_out(kept, medium.grid)
        try:
            return self.pool.run(ReadPatches(medium, self.limits), medium.places[0].name)
        except MediaError as error:
            return error

    def _vision(self, batch: Batch, media: list[Medium], patches: list[Any]) -> Vision | None:
        if not media:
            return None
        counts = [int(np.prod(medium.grid)) for medium in media]
        width, kept = 3 * media[0].patch ** 2, self.store.shape if self.store is not None else None
        if kept is None:
            rows = torch.zeros(sum(counts), width, dtype=torch.uint8)
        else:
            rows = torch.zeros(sum(counts), kept.row_width, dtype=kept.dtype)
        at, unseen = 0, []
        for medium, count, found in zip(media, counts, patches):
            if isinstance(found, torch.Tensor):
                rows[at : at + count] = found
            elif kept is not None:
                blank = isinstance(found, MediaError)
                pixels = torch.zeros(count, width, dtype=torch.uint8) if blank else torch.from_numpy(found)
                unseen.append(Unseen(at, pixels, medium.grid, None if blank else medium))
            elif not isinstance(found, MediaError):
                rows[at : at + count] = torch.from_numpy(found)
            at += count
        return Vision(
            rows,
            torch.tensor([medium.grid for medium in media], dtype=torch.int64),
            (batch.input_ids.flatten() == self.tokens.placeholder).nonzero()[:, 0],
            tuple(unseen),
        )

    def _nothing(self, packs: Sequence[Pack]) -> Vision:
        """For ranks that decode nothing: the batch has pictures, but none of their pixels are here. Every pipeline
        stage then agrees on whether the batch has pictures."""
        shown = next(medium for pack in packs for sample in pack.samples for medium in _media(sample))
        none = torch.zeros(0, dtype=torch.int64)
        return Vision(torch.zeros(0, 3 * shown.patch**2, dtype=torch.uint8), none.view(0, 3), none)

    def _report(self, media: list[Medium], patches: list[Any]) -> None:
        for medium, found in zip(media, patches):
            if isinstance(found, MediaError):
                file, _, line = medium.origin.rpartition(":")
                problem = RowProblem(file, int(line or 0), found.kind, found.reason)
                self.failed.append(problem)
                log.warn(f"{medium.origin}: not trained on: {problem.reason}")


def _media(sample: Sample) -> tuple[Medium, ...]:
    return sample.media.sources if sample.media is not None else ()


def _muted(sample: Sample, blank: set[int]) -> Sample:
    if not any(id(medium) in blank for medium in _media(sample)):
        return sample
    return replace(sample, labels=np.full_like(sample.labels, IGNORE))
