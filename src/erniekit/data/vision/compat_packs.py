"""ERNIEKit's packs of picture samples, for runs that are compared with it: samples in the order of a source until the
next does not fit, and a share of the packs joined into one sequence in which every sample sees those before it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from erniekit.data.types import IGNORE, TEXT, Pack, Sample, SampleMedia

SHARE = 0.3  # of batches that are joined
_SEED = 2048


class JoinedFlags:
    """Whether batch n is joined: one draw each, in order."""

    def __init__(self, share: float = SHARE) -> None:
        self.share, self._draw = share, random.Random(_SEED)
        self._known: list[bool] = []

    def __getitem__(self, batch: int) -> bool:
        while len(self._known) <= batch:
            self._known.append(self._draw.random() < self.share)
        return self._known[batch]


def lengths_like_erniekit(lengths: Sequence[np.ndarray]) -> list[np.ndarray]:
    """It counts the token that is only a target."""
    return [length + 1 for length in lengths]


def joined(samples: Sequence[Sample], end_id: int) -> Sample:
    """One sequence: later samples lose their begin token and go on at the position where the one before ended."""
    if len(samples) == 1:
        return replace(samples[0], media=_last_at_zero(samples[0].media))
    ids, labels, modality, positions, grids = [], [], [], [], []
    sources: list[Any] = []
    after = 0
    for i, sample in enumerate(samples):
        media = sample.media
        assert media is not None
        last, first = i == len(samples) - 1, int(i > 0)
        places = media.positions[first:] - first + after
        more = [] if last else [end_id]  # the end token is an input, as another sample follows
        ids.append(np.concatenate([sample.ids[first:], more]))
        labels.append(np.concatenate([sample.labels[first:], [IGNORE] * len(more)]))
        modality.append(np.concatenate([media.modality[first:], [TEXT] * len(more)]))
        end = places[-1:].max() + 1
        positions.append(np.concatenate([places, np.full((len(more), 3), end)]))
        after = int(end) if more else after
        grids.append(media.grids)
        sources += media.sources
    media = SampleMedia(
        np.concatenate(modality).astype(np.uint8),
        np.concatenate(positions).astype(np.int32),
        np.concatenate(grids),
        tuple(sources),
    )
    return Sample(np.concatenate(ids).astype(np.int32), np.concatenate(labels).astype(np.int32), media=media)


def _last_at_zero(media: SampleMedia | None) -> SampleMedia | None:
    if media is None:
        return None
    positions = media.positions.copy()
    positions[-1] = 0
    return replace(media, positions=positions)


def like_erniekit(pack: Pack, batch: int, flags: JoinedFlags, end_id: int) -> Pack:
    if any(sample.media is None for sample in pack.samples):  # text, which another reader packs
        return pack
    if len(pack.samples) > 1 and not flags[batch]:
        return pack
    return replace(pack, samples=(joined(pack.samples, end_id),))
