"""Micro-batches of a rehearsal: rows as full as the recipe lets them be, of tokens without meaning. For rehearsal.py.

A vision-language model gets pictures and videos in one micro-batch and only text in the next; ranks that read packs of
their own take turns, so that at any time some have pictures and others do not.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from erniekit.config import RunConfig
from erniekit.data.collate import collate
from erniekit.data.preference import PairSample
from erniekit.data.preference_collate import collate_pairs
from erniekit.data.types import IGNORE, IMAGE, TEXT, VIDEO, Batch, Pack, Sample, Vision
from erniekit.data.unpaired import UnpairedSample
from erniekit.data.unpaired_collate import collate_unpaired
from erniekit.models.config import VisionShape
from erniekit.parallel.layout import Layout
from erniekit.recipes.other_models import live_reference
from erniekit.recipes.run_plan import RunPlan

MOST_TOKENS = 1024  # of a picture: 896 x 896 pixels where 28 x 28 are a token
FRAMES = 2  # of a video: they become one, so that it has as many tokens as a picture of its size


def batch_for(plan: RunPlan, number: int) -> Batch:
    """Full rows, every token trained. number: of the micro-batch."""
    cfg, layout = plan.config, plan.world.layout
    length = -(-cfg.data.max_seq_len // layout.length_multiple) * layout.length_multiple
    ids = np.arange(length, dtype=np.int32) % (plan.folder.config.vocab_size - 1) + 1
    rows = range(cfg.train.per_device_train_batch_size)
    known = None if live_reference(cfg) else (-1.0, -1.0)
    if cfg.train.stage in ("DPO", "RM"):
        shared, half = length // 2, length // 2 + (length - length // 2) // 2
        labels = _trained(ids, shared) if cfg.train.stage == "DPO" else _at(length, half - 1, length - 1)
        sample = PairSample(ids, labels, shared, half, half, reference=known)
        return collate_pairs([Pack((sample,), row) for row in rows], pad_to=length)
    if cfg.train.stage == "KTO":
        prompt = length // 2
        own = UnpairedSample(ids, _trained(ids, prompt), prompt, desirable=True)
        judged = replace(own, mismatched=own.behind(own, length), reference=known)
        return collate_unpaired([Pack((judged,), row) for row in rows], pad_to=length)
    if cfg.train.stage == "CLS":
        return collate([Pack((Sample(ids, _at(length, length - 1)),), row) for row in rows], pad_to=length)
    batch = collate([Pack((Sample(ids, ids),), row) for row in rows], pad_to=length, ahead=plan.mtp_tokens)
    vision = plan.folder.config.vision
    if cfg.train.stage != "VL-SFT" or vision is None:
        return batch
    batch = replace(batch, positions=batch.positions[..., None].repeat(1, 1, 3), picture_labels=0)
    if (number + first_seen(cfg, layout, plan.world.rank)) % 2:
        return batch
    return _shown(batch, layout, vision, decodes=plan.world.at["pp"] == 0)


def first_seen(cfg: RunConfig, layout: Layout, rank: int) -> int:
    """0 on ranks whose first micro-batch has pictures, 1 on those whose second has. Ranks that read the same packs, or
    exchange tokens for their experts, are the same: what others would send is taken from what this one has."""
    apart = cfg.train.stage == "VL-SFT" and not layout.experts_over_data
    return layout.data_rank(rank) % 2 if apart else 0


def _trained(ids: np.ndarray, start: int) -> np.ndarray:
    labels = ids.copy()
    labels[:start] = IGNORE
    return labels


def _at(length: int, *places: int) -> np.ndarray:
    """The first class, at these places."""
    labels = np.full(length, IGNORE, np.int32)
    labels[list(places)] = 0
    return labels


def _shown(batch: Batch, layout: Layout, shape: VisionShape, decodes: bool) -> Batch:
    """Pictures and videos in turn, in half of the tokens of every slice that a rank can have of a row: all ranks have
    as many tokens for the vision experts."""
    rows, length = batch.input_ids.shape
    slice_ = length // layout.length_multiple
    each = 1 << (min(slice_ // 2, MOST_TOKENS).bit_length() - 1)
    if slice_ < 2:
        return batch
    high = 1 << (each.bit_length() - 1) // 2
    starts = [
        row * length + start + k * each
        for row in range(rows)
        for start in range(0, length, slice_)
        for k in range(slice_ // 2 // each)
    ]
    frames = [1 if n % 2 == 0 else FRAMES for n in range(len(starts))]
    grids = torch.tensor([(t, shape.merge * high, shape.merge * (each // high)) for t in frames])
    places = (torch.tensor(starts)[:, None] + torch.arange(each)).flatten()
    modality = torch.full((rows * length,), TEXT, dtype=torch.uint8)
    modality[places] = torch.tensor([IMAGE if t == 1 else VIDEO for t in frames], dtype=torch.uint8).repeat_interleave(
        each
    )
    labels = batch.labels.flatten().clone()
    labels[places] = IGNORE
    trained = int((labels != IGNORE).sum())
    if not decodes:  # as data/vision/collate.py has it for ranks without a tower
        grids, places = grids[:0], places[:0]
    patches = torch.zeros(int(grids.prod(1).sum()), shape.patch_size, dtype=torch.uint8)
    return replace(
        batch,
        labels=labels.view(rows, length),
        num_label_tokens=trained,
        picture_labels=trained,
        modality=modality.view(rows, length),
        vision=Vision(patches, grids, places),
    )
