"""The vision tower: patches of pictures and video frames to features, attention inside a frame. Single device.

Called by models/layers/seeing.py. P patches of all frames end to end, W the tower's width, N heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from erniekit.kernels.frame_attention import frame_attention
from erniekit.kernels.rope import frame_cos_sin, rotate_halves
from erniekit.models.config import VisionShape
from erniekit.models.layers.linear import Linear

CHUNK = 16384  # patches a block has activations of at once; a larger frame is one chunk by itself


@dataclass(frozen=True)
class Frames:
    """What all blocks share. Not a tuple: fully_shard casts tensors it finds in those, and angles stay fp32."""

    sizes: list[int]  # patches of each frame
    cos: torch.Tensor  # fp32 [P, 1, D / 2]
    sin: torch.Tensor
    begins: frozenset[int] = frozenset()  # frames that start a chunk, however little is in the one before

    def chunks(self, most: int) -> Iterator[tuple[slice, Frames]]:
        """Whole frames, as many as fit."""
        first = start = stop = 0
        for number, size in enumerate([*self.sizes, most + 1]):
            if stop > start and (stop + size - start > most or number in self.begins):
                here = slice(start, stop)
                yield here, Frames(self.sizes[first:number], self.cos[here], self.sin[here])
                first, start = number, stop
            stop += size


class FrameAttention(nn.Module):
    def __init__(self, v: VisionShape) -> None:
        super().__init__()
        self.heads = v.heads
        self.qkv = Linear(v.width, 3 * v.width)
        self.proj = Linear(v.width, v.width)

    def forward(self, x_PW: torch.Tensor, frames: Frames) -> torch.Tensor:
        q, k, v = self.qkv(x_PW).unflatten(-1, (3, self.heads, -1)).unbind(1)
        q, k = (rotate_halves(t.float(), frames.cos, frames.sin).to(t.dtype) for t in (q, k))
        out: torch.Tensor = self.proj(frame_attention(q, k, v, frames.sizes).flatten(1))
        return out


class VisionMLP(nn.Module):
    def __init__(self, v: VisionShape) -> None:
        super().__init__()
        self.fc1, self.fc2 = Linear(v.width, v.mlp_width), Linear(v.mlp_width, v.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc1(x)
        out: torch.Tensor = self.fc2(h * torch.sigmoid(1.702 * h))  # "quick" GELU
        return out


class VisionBlock(nn.Module):
    """Chunks of frames are taken inside a block, not around the tower: a block is called once a micro-batch on every
    rank, however many pictures each has, so that what gathers its weights is too."""

    chunk = CHUNK

    def __init__(self, v: VisionShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(v.width, v.eps), nn.LayerNorm(v.width, v.eps)
        self.attn, self.mlp = FrameAttention(v), VisionMLP(v)

    def forward(self, x_PW: torch.Tensor, frames: Frames) -> torch.Tensor:
        if x_PW.shape[0] <= self.chunk and not frames.begins:
            return self._on(x_PW, frames)
        return torch.cat([self._on(x_PW[here], some) for here, some in frames.chunks(self.chunk)])

    def _on(self, x_PW: torch.Tensor, frames: Frames) -> torch.Tensor:
        x_PW = x_PW + self.attn(self.norm1(x_PW), frames)
        result: torch.Tensor = x_PW + self.mlp(self.norm2(x_PW))
        return result


class VisionTower(nn.Module):
    # Each picture has products of its own: the last bits of a product depend on its size, and so a picture's features
    # on its neighbours in the batch. Set where they are kept and used again (recipes/vision_features.py).
    alone = False

    def __init__(self, v: VisionShape) -> None:
        super().__init__()
        self.shape = v
        self.patch = Linear(v.patch_size, v.width, bias=False)
        self.blocks = nn.ModuleList(VisionBlock(v) for _ in range(v.depth))
        self.ln = nn.LayerNorm(v.width, v.eps)  # its name decides its weight decay, as in ERNIEKit

    def forward(self, patches: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
        """patches uint8 [P, C * p * p], channel first; grids: (t, h, w) in patches of each -> [P, W]."""
        v = self.shape
        sizes = [h * w for t, h, w in grids for _ in range(t)]
        begins = frozenset(accumulate(t for t, _, _ in grids[:-1])) if self.alone else frozenset()
        frames = Frames(sizes, *frame_cos_sin(grids, v.merge, v.head_dim, v.theta, patches.device), begins)
        x_PW = self.normalised(patches)
        if begins:
            x_PW = torch.cat([self.patch(x) for x in x_PW.split([t * h * w for t, h, w in grids])])
        else:
            x_PW = self.patch(x_PW)
        for block in self.blocks:
            x_PW = block(x_PW, frames)
        result: torch.Tensor = self.ln(x_PW)
        return result

    def normalised(self, patches: torch.Tensor) -> torch.Tensor:
        """As the preprocessor would have: (x / 255 - mean) / std in fp32, then in the tower's dtype."""
        v, device = self.shape, patches.device
        mean, std = (torch.tensor(x, device=device).repeat_interleave(v.patch**2) for x in (v.mean, v.std))
        return ((patches.float() / 255 - mean) / std).to(self.ln.weight.dtype)
