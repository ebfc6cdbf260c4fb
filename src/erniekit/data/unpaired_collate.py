"""Packs of judged answers -> Batch, and with it the mismatched sequences that are measured without gradient.

A BatchLoader for stage KTO is given `collate_unpaired`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from erniekit.data.collate import collate
from erniekit.data.pack import fill_in_order
from erniekit.data.types import IGNORE, Batch, Pack, Pairs, Sample
from erniekit.data.unpaired import UnpairedSample


def collate_unpaired(
    packs: Sequence[Pack], *, pad_id: int = 0, pad_multiple: int = 8, pad_to: int | None = None
) -> Batch:
    """As `collate`. Answer k is segment 2k of this batch's pairs and, behind another row's prompt, segment 2k + 1 of
    `mismatched`. An answer without a label (the loader's filler) is not counted."""
    batch = collate(packs, pad_id=pad_id, pad_multiple=pad_multiple, pad_to=pad_to)
    samples = [_judged(sample) for pack in packs for sample in pack.samples]
    others = [_untrained(s) if not (s.labels != IGNORE).any() else s.mismatched for s in samples]
    counted = [s for s in samples if (s.labels != IGNORE).any()]
    length = batch.input_ids.shape[1]
    space = max(length, *(len(other.ids) for other in others if other is not None))
    bins = fill_in_order([len(other.ids) for other in others if other is not None], space)
    rows = [Pack(tuple(o for o, b in zip(others, bins) if b == row and o is not None)) for row in range(bins[-1] + 1)]
    mismatched = collate(rows, pad_id=pad_id, pad_multiple=pad_multiple, pad_to=pad_to if space == length else None)
    known = [value for sample in counted for value in sample.reference or ()]
    verdicts = torch.tensor([1.0 if sample.desirable else -1.0 for sample in counted])
    reference = torch.tensor(known) if counted and len(known) == 2 * len(counted) else None
    of_rows = Pairs(_segments(packs, length, 0), len(counted), verdicts, reference)
    of_others = Pairs(_segments(rows, mismatched.input_ids.shape[1], 1), len(counted), verdicts)
    return replace(batch, pairs=of_rows, mismatched=replace(mismatched, pairs=of_others))


def _judged(sample: Sample) -> UnpairedSample:
    assert isinstance(sample, UnpairedSample)
    return sample


def _untrained(sample: UnpairedSample) -> Sample:
    """Of a filler nothing is measured, but its ranks make the same calls."""
    assert sample.mismatched is not None
    return replace(sample.mismatched, labels=np.full_like(sample.mismatched.labels, IGNORE))


def _segments(packs: Sequence[Pack], length: int, side: int) -> torch.Tensor:
    """[rows, length]: 2 * number + side where a token is scored; numbers count samples that have a label."""
    out = np.full((len(packs), length), -1, np.int64)
    number = 0
    for row, pack in enumerate(packs):
        at = 0
        for sample in pack.samples:
            scored = sample.labels != IGNORE
            if scored.any():
                out[row, at : at + len(scored)] = np.where(scored, 2 * number + side, -1)
                number += 1
            at += len(scored)
    return torch.from_numpy(out)
