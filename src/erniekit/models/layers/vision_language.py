"""A vision-language decoder: the features of pictures and video frames take the places of their tokens' embeddings.

B batch, L length, H hidden, V vision tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from erniekit.models.config import DecoderConfig
from erniekit.models.layers.attention import Context
from erniekit.models.layers.decoder import PLAN, Decoder
from erniekit.models.layers.resampler import PAIR, Resampler
from erniekit.models.layers.vision import VisionTower
from erniekit.parallel.plan import dealt

LOSS_PICTURES, LOSS_TEXT = "loss_pictures", "loss_text"  # of answers in documents with pictures, and of text only
TOWER, TOKENS = "tower", "tokens"  # what is kept of pictures: the tower's output, or the resampler's
# Whole on every rank of a tensor-parallel group, which deal out the pictures: exact, and no sums inside the tower.
VISION_LANGUAGE_PLAN = {"tower.*": dealt(), "resampler.*": dealt(), **PLAN}


def documents_with(modality: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """bool [B, L]: whether a token's document has a picture. cu_seqlens None: rows are documents."""
    if cu_seqlens is None:
        return (modality != 0).any(1, keepdim=True).expand_as(modality)
    counts = F.pad((modality != 0).flatten().cumsum(0), (1, 0))
    bounds = cu_seqlens.long()
    has = counts[bounds[1:]] > counts[bounds[:-1]]
    return has.repeat_interleave(bounds.diff(), output_size=modality.numel()).view_as(modality)


class LocalInsertion(nn.Module):
    """Slot `insert` of a vision-language model. All tokens of a batch are here."""

    def forward(self, x_BLH: torch.Tensor, features_VH: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The embeddings with features in these places of the flattened [B * L] tokens."""
        flat = x_BLH.flatten(0, 1).index_copy(0, places, features_VH.to(x_BLH.dtype))
        return flat.view_as(x_BLH)


class LocalEncoder(nn.Module):
    """Slot `encode` of a vision-language model: this rank runs the tower on every picture."""

    def forward(self, model: VisionLanguageDecoder, vision: Any) -> torch.Tensor:
        return model.encode_here(vision.patches, vision.grids)


class VisionLanguageDecoder(Decoder):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        assert config.vision is not None
        self.tower = VisionTower(config.vision)
        self.resampler = Resampler(config)
        self.run_tower: Callable[..., torch.Tensor] | None = None  # in place of the tower (parallel/recorded_tower.py)
        self.encode: nn.Module = LocalEncoder()
        self.insert: nn.Module = LocalInsertion()
        # Run the tower for batches without pictures too, on no rows: set where ranks gather its weights together.
        self.always_encodes = False
        # Of batches that hold features in the place of pixels: which ("tower" or "tokens"); None: all hold pixels.
        self.kept: str | None = None

    def front(self) -> Iterator[nn.Module]:
        if self.first:
            yield from self.tower.blocks
            yield self.resampler

    def features(self, vision: Any) -> torch.Tensor:
        """data.types.Vision -> [V, H]."""
        features: torch.Tensor = self.encode(self, vision)
        return features

    def encode_here(self, patches: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        """Patches of the pictures of these grids -> their features, here. Features from the cache skip the tower."""
        shapes = [(int(t), int(h), int(w)) for t, h, w in grids.tolist()]
        if patches.dtype != torch.uint8 and self.kept == TOKENS:
            return self._unfolded(patches, grids)
        run_tower = self.run_tower or self.tower
        x_PW = run_tower(patches, shapes) if patches.dtype == torch.uint8 else patches
        result: torch.Tensor = self.resampler(x_PW, shapes)
        return result

    def _unfolded(self, rows: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        """[P, H / 4] -> [V, H]: a token's features lie in four rows, those of a video in the first half of its rows."""
        assert self.config.vision is not None
        each, width = self.config.vision.merge**2, self.config.hidden_size
        counts = self.picture_tokens(grids)
        parts = rows.split(grids.prod(1).tolist())
        found = [part[: each * count].reshape(count, width) for part, count in zip(parts, counts)]
        return torch.cat(found) if found else rows.new_zeros(0, width)

    def picture_tokens(self, grids: torch.Tensor) -> list[int]:
        assert self.config.vision is not None
        each = self.config.vision.merge**2
        return [t * h * w // (each if t == 1 else each * PAIR) for t, h, w in grids.tolist()]

    def picture_costs(self, grids: torch.Tensor) -> list[float]:
        """Of encoding each, in units of their own: a patch's products, and its attention to all of its frame."""
        v = self.config.vision
        assert v is not None
        return [t * h * w * (2.0 * v.width + v.mlp_width + h * w) for t, h, w in grids.tolist()]

    def embed_batch(self, ids: torch.Tensor, more: Any) -> torch.Tensor:
        x_BLH, vision = self.embed_ids(ids), None if more is None else more.vision
        if vision is not None:
            places: torch.Tensor = self.insert(x_BLH, self.features(vision), vision.places)
            return places
        if self.kept == TOKENS or (not self.always_encodes and not self._trains()):
            return x_BLH
        nothing = ids.new_zeros(0, dtype=torch.int64)
        v = self.config.vision
        assert v is not None
        patches = torch.zeros(0, v.patch_size, dtype=torch.uint8, device=ids.device)
        if self.kept == TOWER:  # as on ranks that have pictures now, of which none is encoded
            patches = torch.zeros(0, v.width, dtype=x_BLH.dtype, device=ids.device)
        inserted: torch.Tensor = self.insert(x_BLH, self.encode_here(patches, torch.zeros(0, 3)), nothing)
        return inserted

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

    def _trains(self) -> bool:
        if not torch.is_grad_enabled():
            return False
        return any(p.requires_grad for part in (self.tower, self.resampler) for p in part.parameters())


if TYPE_CHECKING:  # the contract, checked where it is kept
    from erniekit.model_contract import VisionLanguageModel

    def _model(model: VisionLanguageDecoder) -> VisionLanguageModel:
        return model
