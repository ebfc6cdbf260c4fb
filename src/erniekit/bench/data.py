"""Random tokens in the form training gives them: real Batch objects for us, plain rows of the same tokens for peers.

Called by worker.py. The same seed is the same data for all programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from erniekit.bench.workloads import Rows
from erniekit.data.collate import collate
from erniekit.data.preference import PairSample
from erniekit.data.preference_collate import collate_pairs
from erniekit.data.types import IGNORE, IMAGE, TEXT, Batch, Pack, Sample, Vision


@dataclass(frozen=True)
class PeerRows:
    """What other trainers take. labels are those of the next position, as ours; `positions` only for packed rows."""

    ids: torch.Tensor  # int64 [B, L]
    labels: torch.Tensor  # int64 [B, L], IGNORE where not trained
    positions: torch.Tensor | None = None  # int64 [B, L], restart at 0 in each document
    bounds: torch.Tensor | None = None  # int32 [documents + 1] of a single row
    longest: int = 0  # of the documents between them
    vision: Vision | None = None  # as ours: patches in bytes
    modality: torch.Tensor | None = None
    scored: int = 0  # preference rows (chosen and rejected in turn): only the last so many places are trained

    @property
    def unshifted(self) -> torch.Tensor:
        """labels as transformers takes them: at the place of the token itself. A row's last place trains nothing."""
        return torch.nn.functional.pad(self.labels[:, :-1], (1, 0), value=IGNORE)

    def to(self, device: torch.device) -> PeerRows:
        moved: dict[str, Any] = {
            name: t.to(device, non_blocking=True) for name, t in vars(self).items() if isinstance(t, torch.Tensor)
        }
        if self.vision is not None:
            patches, places = (t.to(device, non_blocking=True) for t in (self.vision.patches, self.vision.places))
            moved["vision"] = Vision(patches, self.vision.grids, places)
        return replace(self, **moved)


@dataclass(frozen=True)
class StepData:
    batch: Batch
    rows: PeerRows


class PictureIds(NamedTuple):
    """Of a vision-language model."""

    place: int
    start: int
    end: int
    patch: int  # pixels of its side

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> PictureIds | None:
        """From a config.json; None: it does not see."""
        if "vision_config" not in model:
            return None
        start, end = (int(model[f"image_{which}_token_id"]) for which in ("start", "end"))
        return cls(int(model["im_patch_id"]), start, end, int(model["vision_config"]["patch_size"]))


def make_steps(rows: Rows, vocab: int, count: int, seed: int, ids: PictureIds | None = None) -> list[StepData]:
    """`count` different steps. ids: the token ids of a picture, where rows have some."""
    if rows.pictures:
        assert ids is not None
        return [_seen(rows, vocab, seed + k, ids) for k in range(count)]
    return [_pairs(rows, vocab, seed + k) if rows.pairs else _documents(rows, vocab, seed + k) for k in range(count)]


def _documents(rows: Rows, vocab: int, seed: int) -> StepData:
    rng = np.random.default_rng(seed)
    packs = []
    for number in range(rows.count):
        lengths = document_lengths(rows, rng)
        packs.append(Pack(tuple(_sample(n, rows.masked, vocab, rng) for n in lengths), number))
    batch = collate(packs, pad_to=rows.length)
    positions = batch.positions if rows.mean else None
    bounds = batch.cu_seqlens if rows.count == 1 else None
    longest = 0 if bounds is None else int(bounds.diff().max())
    return StepData(batch, PeerRows(batch.input_ids, batch.labels, positions, bounds, longest))


def document_lengths(rows: Rows, rng: np.random.Generator) -> list[int]:
    """They fill the row exactly; the last one is what was left."""
    if not rows.mean:
        return [rows.length]
    out: list[int] = []
    room = rows.length
    while room:
        drawn = int(rng.lognormal(np.log(rows.mean) - rows.spread**2 / 2, rows.spread))
        out.append(min(room, max(2, drawn)))
        room -= out[-1]
    return out


def _sample(length: int, masked: float, vocab: int, rng: np.random.Generator) -> Sample:
    ids = rng.integers(3, vocab, length, dtype=np.int32)
    labels = np.append(ids[1:], IGNORE).astype(np.int32)  # nothing follows a document's last token
    labels[: int(masked * length)] = IGNORE
    return Sample(ids, labels)


def _seen(rows: Rows, vocab: int, seed: int, ids: PictureIds) -> StepData:
    """Documents of one picture and text behind it, which is what is trained; patches are noise."""
    rng = np.random.default_rng(seed)
    high, wide = sides(rows.picture)
    made = [pictured_row(rows, vocab, rng, ids) for _ in range(rows.count)]
    packs = [Pack(tuple(sample for sample, _, _ in row), number) for number, row in enumerate(made)]
    positions, modality = [at for row in made for _, at, _ in row], [kinds for row in made for _, _, kinds in row]
    count = rows.count * rows.pictures
    patches = rng.integers(0, 256, (count * 4 * rows.picture, 3 * ids.patch**2), dtype=np.uint8)
    batch = collate(packs, pad_to=rows.length)
    shown = (batch.input_ids.flatten() == ids.place).nonzero()[:, 0]
    vision = Vision(torch.from_numpy(patches), torch.tensor([[1, 2 * high, 2 * wide]] * count), shown)
    shape = (rows.count, rows.length)
    kinds = torch.from_numpy(np.concatenate(modality)).view(shape)
    where = torch.from_numpy(np.concatenate(positions)).view(*shape, 3)
    batch = replace(batch, positions=where, modality=kinds, vision=vision)
    longest = int(batch.cu_seqlens.diff().max())
    return StepData(
        batch, PeerRows(batch.input_ids, batch.labels, where, batch.cu_seqlens, longest, vision=vision, modality=kinds)
    )


def pictured_row(
    rows: Rows, vocab: int, rng: np.random.Generator, ids: PictureIds
) -> list[tuple[Sample, np.ndarray, np.ndarray]]:
    """Each document with its positions [n, 3] and its tokens' modality [n]."""
    high, wide = sides(rows.picture)
    sizes = [rows.length // rows.pictures] * rows.pictures
    sizes[-1] += rows.length - sum(sizes)
    picture_tokens, out = rows.picture + 2, []  # with its marks
    for size in sizes:
        sample = _sample(size, 0.0, vocab, rng)
        text = np.where(sample.ids == ids.place, 3, sample.ids).astype(np.int32)
        text[:picture_tokens] = [ids.start, *[ids.place] * rows.picture, ids.end]
        labels = np.append(text[1:], IGNORE).astype(np.int32)
        labels[: picture_tokens - 1] = IGNORE
        kinds = np.where(np.arange(size) < picture_tokens, IMAGE, TEXT).astype(np.uint8)
        out.append((Sample(text, labels), _places(size, high, wide), kinds))
    return out


def sides(tokens: int) -> tuple[int, int]:
    """Of a picture of so many tokens, as square as it can be."""
    high = next(h for h in range(int(tokens**0.5), 0, -1) if tokens % h == 0)
    return high, tokens // high


def _places(size: int, high: int, wide: int) -> np.ndarray:
    """[size, 3]: a mark, the picture's rows and columns, and text behind its longer side."""
    out = np.zeros((size, 3), np.int64)
    rows, columns = np.divmod(np.arange(high * wide), wide)
    out[1 : 1 + high * wide] = 1 + np.stack([np.zeros_like(rows), rows, columns], 1)
    after = 1 + high * wide
    out[after:] = (1 + max(high, wide) + np.arange(size - after))[:, None]
    return out


def _pairs(rows: Rows, vocab: int, seed: int) -> StepData:
    """Prompts of one length and answers of one length, so that peers need no padding."""
    rng = np.random.default_rng(seed)
    each = rows.length // rows.pairs
    prompt = each - 2 * rows.answer  # the layout keeps the prompt's last token twice and leaves out both answers' ends
    samples, ids, labels = [], [], []
    for _ in range(rows.count * rows.pairs):
        question = rng.integers(3, vocab, prompt, dtype=np.int32)
        answers = [rng.integers(3, vocab, rows.answer, dtype=np.int32) for _ in range(2)]
        samples.append(_pair(question, *answers))
        for answer in answers:
            ids.append(np.concatenate([question, answer[:-1]]))
            labels.append(np.concatenate([np.full(prompt - 1, IGNORE, np.int32), answer]))
    per_row = rows.pairs
    packs = [Pack(tuple(samples[r * per_row : (r + 1) * per_row]), r) for r in range(rows.count)]
    batch = collate_pairs(packs, pad_to=rows.length)
    both = [torch.from_numpy(np.stack(part)).long() for part in (ids, labels)]
    return StepData(batch, PeerRows(both[0], both[1], scored=rows.answer))


def _pair(prompt: np.ndarray, chosen: np.ndarray, rejected: np.ndarray) -> PairSample:
    """As data/preference_assemble.py lays a pair out."""
    shared = len(prompt) - 1
    ids = np.concatenate([prompt, chosen[:-1], prompt[-1:], rejected[:-1]])
    labels = np.concatenate([np.full(shared, IGNORE, np.int32), chosen, rejected])
    return PairSample(ids, labels, shared, shared + len(chosen), shared + len(chosen))
