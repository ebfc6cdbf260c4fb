"""The vision tower: patches of pictures and video frames to features, attention inside a frame. Single device.

Called by models/layers/vision_language.py. P patches of all frames end to end, W the tower's width, N heads, D
head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    bounds: torch.Tensor  # int32 [frames + 1]: where each begins
    products: tuple[int, ...] = ()  # rows that are multiplied apart from the others; empty: all together

    @staticmethod
    def of(sizes: list[int], cos: torch.Tensor, sin: torch.Tensor, products: tuple[int, ...] = ()) -> Frames:
        bounds = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32).to(cos.device, non_blocking=True)
        return Frames(sizes, cos, sin, bounds, products)

    def chunks(self, most: int, begins: frozenset[int] = frozenset()) -> list[tuple[slice, Frames]]:
        """Whole frames, as many as fit. begins: the frames with which another picture begins, which are then multiplied
        apart from each other, and a picture that does not fit in pieces that do not depend on what is around it."""
        pieces = list(self._pieces(most, begins))
        out, first = [], 0
        for number in range(1, len(pieces) + 1):
            here = pieces[first : number + 1]
            if number < len(pieces) and sum(sum(self.sizes[piece]) for piece in here) <= most:
                continue
            mine = pieces[first:number]
            frames = slice(mine[0].start, mine[-1].stop)
            start = sum(self.sizes[: frames.start])
            rows = slice(start, start + sum(self.sizes[frames]))
            products = tuple(sum(self.sizes[piece]) for piece in mine) if begins else ()
            out.append((rows, Frames.of(self.sizes[frames], self.cos[rows], self.sin[rows], products)))
            first = number
        return out

    def _pieces(self, most: int, begins: frozenset[int]) -> Iterator[slice]:
        first = held = 0
        for number, size in enumerate([*self.sizes, most + 1]):
            if number > first and (held + size > most or number in begins):
                yield slice(first, number)
                first, held = number, 0
            held += size


def rotated(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[P, 3, N, D] -> q and k with positions, v."""
    q, k, v = qkv.unbind(1)
    return *(rotate_halves(t.float(), cos, sin).to(t.dtype) for t in (q, k)), v


def quick_gelu(h: torch.Tensor) -> torch.Tensor:
    return h * torch.sigmoid(1.702 * h)


class FrameAttention(nn.Module):
    by_row = ("rotated",)
    rotated: Callable[..., tuple[torch.Tensor, ...]] = staticmethod(rotated)

    def __init__(self, v: VisionShape) -> None:
        super().__init__()
        self.heads = v.heads
        self.qkv = Linear(v.width, 3 * v.width)
        self.proj = Linear(v.width, v.width)

    def forward(self, x_PW: torch.Tensor, frames: Frames) -> torch.Tensor:
        qkv = multiplied(self.qkv, x_PW, frames.products)
        q, k, v = self.rotated(qkv.unflatten(-1, (3, self.heads, -1)), frames.cos, frames.sin)
        return multiplied(self.proj, frame_attention(q, k, v, frames.sizes, frames.bounds).flatten(1), frames.products)


class VisionMLP(nn.Module):
    by_row = ("activation",)
    activation: Callable[[torch.Tensor], torch.Tensor] = staticmethod(quick_gelu)

    def __init__(self, v: VisionShape) -> None:
        super().__init__()
        self.fc1, self.fc2 = Linear(v.width, v.mlp_width), Linear(v.mlp_width, v.width)

    def forward(self, x: torch.Tensor, frames: Frames) -> torch.Tensor:
        return multiplied(self.fc2, self.activation(multiplied(self.fc1, x, frames.products)), frames.products)


def multiplied(linear: nn.Module, x: torch.Tensor, apart: tuple[int, ...]) -> torch.Tensor:
    """apart: so many rows at a time."""
    out: torch.Tensor = linear(x) if len(apart) < 2 else torch.cat([linear(part) for part in x.split(apart)])
    return out


class VisionBlock(nn.Module):
    """Chunks of frames are taken inside a block, not around the tower: a block is called once a micro-batch on every
    rank, however many pictures each has, so that what gathers its weights is too."""

    def __init__(self, v: VisionShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(v.width, v.eps), nn.LayerNorm(v.width, v.eps)
        self.attn, self.mlp = FrameAttention(v), VisionMLP(v)

    def forward(self, x_PW: torch.Tensor, chunks: list[tuple[slice, Frames]]) -> torch.Tensor:
        if len(chunks) == 1:
            return self._on(x_PW, chunks[0][1])
        return torch.cat([self._on(x_PW[here], some) for here, some in chunks])

    def _on(self, x_PW: torch.Tensor, frames: Frames) -> torch.Tensor:
        x_PW = x_PW + self.attn(self.norm1(x_PW), frames)
        result: torch.Tensor = x_PW + self.mlp(self.norm2(x_PW), frames)
        return result


class VisionTower(nn.Module):
    # Each picture has products of its own: the last bits of a product depend on its size, and so a picture's features
    # on its neighbours in the batch. Set where they are kept and used again (recipes/vision_features.py).
    alone = False
    chunk = CHUNK

    def __init__(self, v: VisionShape) -> None:
        super().__init__()
        self.shape = v
        self.patch = Linear(v.patch_size, v.width, bias=False)
        self.blocks = nn.ModuleList(VisionBlock(v) for _ in range(v.depth))
        self.ln = nn.LayerNorm(v.width, v.eps)  # its name decides its weight decay, as in ERNIEKit

    def forward(self, patches: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
        """patches uint8 [P, C * p * p], channel first; grids: (t, h, w) in patches of each -> [P, W]."""
        apart = tuple(t * h * w for t, h, w in grids) if self.alone else ()
        return self.through_blocks(self.normalised(patches), self.chunks_of(grids, patches.device), apart)

    def chunks_of(self, grids: list[tuple[int, int, int]], device: torch.device) -> list[tuple[slice, Frames]]:
        v = self.shape
        sizes = [h * w for t, h, w in grids for _ in range(t)]
        begins = frozenset(accumulate(t for t, _, _ in grids[:-1])) if self.alone else frozenset()
        frames = Frames.of(sizes, *frame_cos_sin(grids, v.merge, v.head_dim, v.theta, device))
        return frames.chunks(self.chunk, begins) or [(slice(0, 0), frames)]

    def through_blocks(
        self, normalised: torch.Tensor, chunks: list[tuple[slice, Frames]], apart: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """Launches only: nothing is copied from the host or waited for (parallel/recorded_tower.py records it)."""
        x_PW = multiplied(self.patch, normalised, apart)
        for block in self.blocks:
            x_PW = block(x_PW, chunks)
        result: torch.Tensor = self.ln(x_PW)
        return result

    def normalised(self, patches: torch.Tensor) -> torch.Tensor:
        """As the preprocessor would have: (x / 255 - mean) / std in fp32, then in the tower's dtype."""
        v, device = self.shape, patches.device
        mean, std = (torch.tensor(x, device=device).repeat_interleave(v.patch**2) for x in (v.mean, v.std))
        return ((patches.float() / 255 - mean) / std).to(self.ln.weight.dtype)
