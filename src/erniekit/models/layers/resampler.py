"""From the tower's features to vision tokens: 2 x 2 patches become one, then two frames of a video. Single device.

Called by models/layers/vision_language.py. P patches, S = 4 W the width of merged patches, V vision tokens, H hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from erniekit.models.config import DecoderConfig
from erniekit.models.layers.linear import Linear
from erniekit.models.layers.norm import RMSNorm

PAIR = 2  # frames that become one


class Merged(nn.Module):
    """Two linears and a LayerNorm over what was put side by side."""

    def __init__(self, inputs: int, width: int, eps: float) -> None:
        super().__init__()
        self.fc1, self.fc2 = Linear(inputs, width), Linear(width, width)
        self.ln = nn.LayerNorm(width, eps)  # its name decides its weight decay, as in ERNIEKit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.ln(self.fc2(F.gelu(self.fc1(x))))
        return result


class Resampler(nn.Module):
    alone = False  # as VisionTower's

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        v = config.vision
        assert v is not None
        S, self.merge = v.merged_width, v.merge
        self.spatial, self.temporal = Merged(S, S, v.eps), Merged(PAIR * S, S, v.eps)
        self.proj = Linear(S, config.hidden_size)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_PW: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
        """[P, W] -> [V, H], in the order of the pictures."""
        if self.alone and len(grids) > 1:
            parts = x_PW.split([t * h * w for t, h, w in grids])
            return torch.cat([self._on(part, [grid]) for part, grid in zip(parts, grids)])
        return self._on(x_PW, grids)

    def _on(self, x_PW: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
        count, width = x_PW.shape
        x = self.spatial(x_PW.reshape(count // self.merge**2, width * self.merge**2))
        first, second = frame_pairs(grids, self.merge)
        x = torch.cat([x.index_select(0, index.to(x.device)) for index in (first, second)], dim=-1)
        result: torch.Tensor = self.norm(self.proj(self.temporal(x)))
        return result


def frame_pairs(grids: list[tuple[int, int, int]], merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which merged patches become a token together, int64 [V] each: those of frames 0 and 1, 2 and 3 and so on of a
    video; a picture's with themselves."""
    first, second, start = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)], 0
    for t, h, w in grids:
        each = h * w // merge**2
        places = torch.arange(start, start + t * each).view(t, each)
        assert t == 1 or t % PAIR == 0, "a video has an even number of frames"
        first.append(places[::PAIR].flatten())
        second.append(places[PAIR - 1 :: PAIR].flatten() if t > 1 else places.flatten())
        start += t * each
    return torch.cat(first), torch.cat(second)
