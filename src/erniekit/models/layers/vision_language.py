"""A vision-language decoder: the features of pictures and video frames take the places of their tokens' embeddings.

B batch, L length, H hidden, V vision tokens, P patches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from erniekit.model_contract import PICTURES, Tower
from erniekit.models.config import DecoderConfig
from erniekit.models.layers.attention import Context
from erniekit.models.layers.decoder import Decoder
from erniekit.models.layers.resampler import PAIR, Resampler
from erniekit.models.layers.tower import InputTower
from erniekit.models.layers.vision import VisionTower
from erniekit.parallel.plan import Rule, dealt

LOSS_PICTURES, LOSS_TEXT = "loss_pictures", "loss_text"  # of answers in documents with pictures, and of text only
TOWER, TOKENS = "tower", "tokens"  # what is kept of pictures: the tower's output, or the resampler's


def documents_with(modality: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """bool [B, L]: whether a token's document has a picture. cu_seqlens None: rows are documents."""
    if cu_seqlens is None:
        return (modality != 0).any(1, keepdim=True).expand_as(modality)
    counts = F.pad((modality != 0).flatten().cumsum(0), (1, 0))
    bounds = cu_seqlens.long()
    has = counts[bounds[1:]] > counts[bounds[:-1]]
    return has.repeat_interleave(bounds.diff(), output_size=modality.numel()).view_as(modality)


class PicturePatches(NamedTuple):
    """What this tower needs of a data.types.Vision."""

    patches: torch.Tensor
    grids: torch.Tensor
    places: torch.Tensor


class PictureInput(InputTower):
    """Pictures and video frames, by way of the vision tower and the resampler behind it."""

    name = PICTURES
    prefixes: tuple[str, ...] = ("tower.", "resampler.")
    adapts: tuple[str, ...] = ("resampler.",)
    # Whole on every rank of a tensor-parallel group, which deal out the pictures: exact, and no sums inside the tower.
    plan: Mapping[str, Rule] = {"tower.*": dealt(), "resampler.*": dealt()}

    def __init__(self, config: DecoderConfig, tower: VisionTower, resampler: Resampler) -> None:
        super().__init__()
        assert config.vision is not None
        self.shape, self.width = config.vision, config.hidden_size
        self.tower, self.resampler = tower, resampler
        self.recordable = tower
        # Of batches that hold features in the place of pixels: which ("tower" or "tokens"); None: all hold pixels.
        self.kept: str | None = None

    def modules(self) -> Sequence[nn.Module]:
        return self.tower, self.resampler

    def blocks(self) -> Iterator[nn.Module]:
        yield from self.tower.blocks
        yield self.resampler

    def encode_here(self, inputs: Any) -> torch.Tensor:
        return self.features_of(inputs.patches, inputs.grids)

    def features_of(self, patches: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        """Patches of the pictures of these grids -> their features [V, H]. Features from the cache skip the tower."""
        shapes = [(int(t), int(h), int(w)) for t, h, w in grids.tolist()]
        if patches.dtype != torch.uint8 and self.kept == TOKENS:
            return self._unfolded(patches, grids)
        run = self.run or self.tower
        x_PW = run(patches, shapes) if patches.dtype == torch.uint8 else patches
        result: torch.Tensor = self.resampler(x_PW, shapes)
        return result

    def _unfolded(self, rows: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        """[P, H / 4] -> [V, H]: a token's features lie in four rows, those of a video in the first half of its rows."""
        each, counts = self.shape.merge**2, self._tokens(grids)
        parts = rows.split(grids.prod(1).tolist())
        found = [part[: each * count].reshape(count, self.width) for part, count in zip(parts, counts)]
        return torch.cat(found) if found else rows.new_zeros(0, self.width)

    def counts(self, inputs: Any) -> list[int]:
        return self._tokens(inputs.grids)

    def _tokens(self, grids: torch.Tensor) -> list[int]:
        each = self.shape.merge**2
        return [t * h * w // (each if t == 1 else each * PAIR) for t, h, w in grids.tolist()]

    def costs(self, inputs: Any) -> list[float]:
        """A patch's products, and its attention to all of its frame."""
        v = self.shape
        return [t * h * w * (2.0 * v.width + v.mlp_width + h * w) for t, h, w in inputs.grids.tolist()]

    def select(self, inputs: Any, items: Sequence[int]) -> Any:
        parts = inputs.patches.split(inputs.grids.prod(1).tolist())
        patches = torch.cat([parts[n] for n in items]) if items else inputs.patches[:0]
        return inputs._replace(patches=patches, grids=inputs.grids[torch.tensor(items, dtype=torch.int64)])

    def nothing(self, x_BLH: torch.Tensor) -> PicturePatches | None:
        if self.kept == TOKENS:
            return None
        if self.kept == TOWER:  # as on ranks that have pictures now, of which none is encoded
            patches = x_BLH.new_zeros(0, self.shape.width)
        else:
            patches = torch.zeros(0, self.shape.patch_size, dtype=torch.uint8, device=x_BLH.device)
        return PicturePatches(patches, torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64, device=x_BLH.device))


class VisionLanguageDecoder(Decoder):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        assert config.vision is not None
        self.tower = VisionTower(config.vision)
        self.resampler = Resampler(config)
        self.pictures = PictureInput(config, self.tower, self.resampler)

    def towers(self) -> Mapping[str, Tower]:
        return {**super().towers(), self.pictures.name: self.pictures}

    def answers_loss(
        self, h_BLH: torch.Tensor, labels: torch.Tensor, ignore: int, chunk: int, scale: float | None, ctx: Context,
        more: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Documents with pictures and those of text only have losses of their own in the record; where a batch has
        both, the head takes them one after the other."""
        with_pictures = None if more is None or more.trained is None else more.picture_labels
        if with_pictures is None or ctx.record is None:
            return super().answers_loss(h_BLH, labels, ignore, chunk, scale, ctx, more)
        counts = {LOSS_PICTURES: with_pictures, LOSS_TEXT: more.trained - with_pictures}
        present = [name for name, count in counts.items() if count]
        if len(present) < 2:
            loss = super().answers_loss(h_BLH, labels, ignore, chunk, scale, ctx, more)
            losses = {name: loss for name in present}
        else:
            assert ctx.modality is not None
            pictured = documents_with(ctx.modality, ctx.cu_seqlens)
            losses = {
                name: super(VisionLanguageDecoder, self).answers_loss(
                    h_BLH, labels.masked_fill(others, ignore), ignore, chunk, scale, ctx,
                    more._replace(trained=counts[name]),
                )
                for name, others in ((LOSS_PICTURES, ~pictured), (LOSS_TEXT, pictured))
            }  # fmt: skip
            loss = losses[LOSS_PICTURES] + losses[LOSS_TEXT]
        for name, part in losses.items():
            ctx.record[name, 0] = (part.detach() if scale is None else part.detach() / scale, counts[name])
        return loss


if TYPE_CHECKING:  # the contract, checked where it is kept
    from erniekit.model_contract import PictureTower

    def _pictures(tower: PictureInput) -> PictureTower:
        return tower
