"""The doctor's checks of a vision-language model: pixels reach only their own document, and are not ignored.

Called by the stages of vl_sft.py and dpo.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from erniekit.checkpoint.probe import PictureTokens, Probe, with_picture
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import IGNORE, Batch, Sample, Vision
from erniekit.data.vision.rules import VisionTokens
from erniekit.log import warn
from erniekit.parallel.engine import Engine
from erniekit.recipes.built import Built
from erniekit.recipes.check import MOVED_BY_ROUNDING, Check

LEAK_TOKENS = 24  # of each document
GREY = 127  # of a blank pixel
IGNORED = 1e-5  # of the loss: a smaller change than this is none


def picture_tokens(built: Built, tokenizer: Tokenizer) -> PictureTokens:
    """What a made-up picture needs."""
    tokens, v = VisionTokens.of(tokenizer), built.folder.config.vision
    assert v is not None
    return PictureTokens(tokens.image_start, tokens.placeholder, tokens.image_end, v.patch_size, v.merge)


def pixels_stay_inside(built: Built, shown: PictureTokens) -> Check:
    """Two documents with a picture each: other pixels in the first must move its own logits and not one bit of the
    second's. As in doctor.no_leak, experts get the tokens of both in one product: there most must stay."""
    multiple = built.engine.length_multiple
    half = -(-LEAK_TOKENS // multiple) * multiple
    batch = two_pictures(built.folder.config.vocab_size, shown, half)
    assert batch.vision is not None
    patches = batch.vision.patches.clone()
    patches[: patches.shape[0] // 2] = 255 - patches[: patches.shape[0] // 2]
    other = replace(batch, vision=batch.vision._replace(patches=patches))
    a, b = (built.engine.answer(x) for x in (batch, other))
    spread = (a - b).abs().amax(-1)[0]
    own, leaked = float(spread[:half].max()), float(spread[half:].max())
    if built.folder.config.moe is not None:
        typical = float(spread[half:].median())
        leaked = typical if typical > MOVED_BY_ROUNDING * float(a.std()) else 0.0
    if leaked:
        text = f"pixels of one document move the logits of the next by {leaked:.1e}"
    else:
        text = "pixels affect only their own document" if own else "other pixels move no logit of their own document"
    return Check("pixels", own > 0 and not leaked, text, "set attention: reference and report this")


def two_pictures(vocab: int, shown: PictureTokens, half: int) -> Batch:
    """One row of two documents of `half` tokens, each behind a picture."""
    made = []
    for seed in range(2):
        ids = torch.randint(0, vocab, (1, half), generator=torch.Generator().manual_seed(seed))
        marks = torch.tensor([shown.start, shown.placeholder, shown.end])
        plain = next(i for i in range(vocab) if i not in marks.tolist())
        ids[torch.isin(ids, marks)] = plain
        made.append(with_picture(Probe(ids, ids.roll(-1)), shown))
    pictures = [probe.picture for probe in made if probe.picture is not None]
    return Batch(
        input_ids=torch.cat([probe.ids[:, :half] for probe in made], 1),
        labels=torch.full((1, 2 * half), IGNORE),
        positions=torch.cat([p.positions[:, :half] for p in pictures], 1),
        cu_seqlens=torch.tensor([0, half, 2 * half], dtype=torch.int32),
        max_doc=half,
        num_label_tokens=0,
        modality=torch.cat([p.modality[:, :half] for p in pictures], 1),
        vision=Vision(
            torch.cat([pictures[0].patches, pictures[1].patches.flip(0)]),
            torch.cat([p.grids for p in pictures]),
            torch.cat([p.places + half * n for n, p in enumerate(pictures)]),
        ),
    )


def pixels_count(engine: Engine, first: Batch) -> Check:
    """The loss of the first batch, and with blank pixels. No failure: some rows can be answered without looking."""
    vision = first.vision
    if not any(engine.world.gather(vision is not None and first.num_label_tokens > 0)):
        return Check("blank pixels", True, "the first rows have no picture to blank out")
    true, blank = (_loss(engine, batch) for batch in (first, blanked(first)))
    text = f"loss of the first rows {true:.4f}, with blank pixels {blank:.4f}"
    if not abs(true - blank) > IGNORED * abs(true):
        warn(f"the model ignores pixels: {text}; its answers will not depend on pictures")
        text += ": pixels are ignored"
    return Check("blank pixels", True, text)


def blanked(batch: Batch) -> Batch:
    vision = batch.vision
    if vision is None:  # a later pipeline stage
        return batch
    return replace(batch, vision=vision._replace(patches=torch.full_like(vision.patches, GREY)))


def _loss(engine: Engine, batch: Batch) -> float:
    """All ranks have the same batch."""
    total = engine.sum_losses(engine.evaluate(batch))
    return float(total) / max(1, batch.num_label_tokens) / engine.world.layout.data_ranks


def picture_lines(sample: Sample, tokens: list[int]) -> Iterator[str]:
    """Each picture or video of a sample as the model sees it. tokens: of each."""
    if sample.media is None:
        return
    for medium, count in zip(sample.media.sources, tokens):
        t, h, w = medium.grid
        kind = f"{t} frames of {w * medium.patch} x {h * medium.patch}" if medium.video else ""
        size = kind or f"{w * medium.patch} x {h * medium.patch}"
        yield f"{medium.places[0].name}: seen as {size} pixels, grid {t} x {h} x {w}, {count} tokens"
