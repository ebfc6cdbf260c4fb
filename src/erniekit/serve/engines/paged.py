"""The keys and values of all running sequences in one pool of blocks, and attention that reads them there.

Used by plain_step.py and recorded.py; embedded.py plans a step. `PagedAttention` replaces a layer's
InnerAttention.
T tokens of the step, S slots, N heads, D head_dim, R rows that decode, M longest of them.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from erniekit.models.config import DecoderConfig
from erniekit.models.costs import cache_bytes
from erniekit.models.layers.attention import Attention, Context, InnerAttention
from erniekit.serve.engines.vision_input import PromptVision


class PagedCache:
    """Blocks of `size` slots. A slot holds one position's key and value in every layer. Behind the blocks of sequences
    is one more, which rows that fill up a batch write to (recorded.py).

    A full block whose tokens are known is kept when its sequence leaves, until its space is needed: a sequence that
    begins with the same tokens, of the same key (a model's), takes it as it is, also while others have it. Such a block
    is known by a digest of its tokens and of the digest of the block before it: it identifies all up to its end.
    """

    def __init__(
        self,
        config: DecoderConfig,
        blocks: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        mtp: bool = False,
    ) -> None:
        """mtp: with the keys and values of the first MTP layer, which proposes tokens (speculation.py)."""
        shape = ((blocks + 1) * size, config.num_kv_heads, config.head_dim)
        self.blocks, self.size = blocks, size
        self.mtp_layer = config.num_layers  # where its keys and values are
        layers = config.num_layers + mtp
        self.keys = [_zeros(shape, dtype, device) for _ in range(layers)]
        self.values = [_zeros(shape, dtype, device) for _ in range(layers)]
        self.queried = self.shared = 0  # positions that were looked for, and those that were taken as they were
        self._free = list(range(blocks - 1, -1, -1))
        self._holders = [0] * blocks
        self._kept: OrderedDict[int, None] = OrderedDict()  # cached blocks without a reference, the oldest first
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> PagedCache:
        """Itself: copies of a model's modules (adapter_batch.py) use the same pool, which is most of the memory."""
        return self

    def blocks_for(self, length: int) -> int:
        return -(-length // self.size)

    @property
    def free_blocks(self) -> int:
        """Blocks that can be had."""
        return len(self._free) + len(self._kept)

    def grow(self, table: list[int], length: int) -> bool:
        """Blocks for `length` positions put into `table`; False, and nothing taken, when there are too few."""
        missing = self.blocks_for(length) - len(table)
        if missing > self.free_blocks:
            return False
        for _ in range(missing):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._kept.popitem(last=False)
                del self._block_of[self._digest_of.pop(block)]
            self._holders[block] = 1
            table.append(block)
        return True

    def release(self, table: list[int]) -> None:
        """The end of a sequence goes first, when space is needed: its beginning is more likely to be another's."""
        for block in reversed(table):
            self._holders[block] -= 1
            if not self._holders[block]:
                if block in self._digest_of:
                    self._kept[block] = None
                else:
                    self._free.append(block)
        table.clear()

    def share(self, ids: Sequence[int], key: str, table: list[int]) -> int:
        """Known blocks that `ids` begin with put into an empty `table`; how many positions that are, one less at least
        than there are ids: the last one is always computed."""
        for digest in self._digests(ids[: (len(ids) - 1) // self.size * self.size], key):
            block = self._block_of.get(digest)
            if block is None:
                break
            self._holders[block] += 1
            self._kept.pop(block, None)
            table.append(block)
        self.queried += len(ids)
        self.shared += len(table) * self.size
        return len(table) * self.size

    def keep(self, ids: Sequence[int], key: str, table: Sequence[int]) -> None:
        """The full blocks of `ids`, all computed, are known from now on."""
        for digest, block in zip(self._digests(ids, key), table):
            if block not in self._digest_of and digest not in self._block_of:
                self._block_of[digest], self._digest_of[block] = block, digest

    def _digests(self, ids: Sequence[int], key: str) -> Iterator[bytes]:
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        for end in range(self.size, len(ids) + 1, self.size):
            own = array("q", ids[end - self.size : end]).tobytes()
            digest = hashlib.blake2b(own, key=digest, digest_size=16).digest()
            yield digest

    @property
    def used(self) -> float:
        return 1 - self.free_blocks / self.blocks


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """On a host its pages are taken as they are first written: a long context costs what is used of it."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def bytes_per_block(config: DecoderConfig, size: int, dtype: torch.dtype, mtp: bool = False) -> int:
    layers = config.num_layers
    return size * cache_bytes(config, dtype.itemsize) * (layers + mtp) // layers


@dataclass(frozen=True)
class SequencePiece:
    """Positions [start, stop) of one sequence that this step computes; `table` are its blocks."""

    ids: Sequence[int]
    start: int
    stop: int
    table: Sequence[int]
    vision: PromptVision | None = None  # of its prompt

    @property
    def decodes(self) -> bool:
        return self.stop - self.start == 1


@dataclass(frozen=True)
class Step:
    """Everything a forward pass over some pieces needs, laid out once for all layers. Decoding rows come first."""

    tokens: torch.Tensor  # [1, T]
    positions: torch.Tensor  # [1, T]; [1, T, 3] (t, h, w) where a prompt has pictures
    modality: torch.Tensor | None  # uint8 [1, T], where some tokens are not text
    write: torch.Tensor  # [T]: the slot of each token
    rows: int  # R
    read: torch.Tensor  # [R * M]: slots of each decoding row; behind its end the first one again
    seen: torch.Tensor  # bool [R, 1, 1, M]: False behind the end
    chunks: tuple[tuple[int, int, torch.Tensor], ...]  # (first token, one past the last, slots of all so far)
    last: torch.Tensor  # [pieces]: the last token of each

    @classmethod
    def of(cls, pieces: Sequence[SequencePiece], size: int, device: torch.device | str) -> Step:
        """`pieces` must have those that decode in front."""
        rows = sum(p.decodes for p in pieces)
        assert all(p.decodes for p in pieces[:rows])
        tokens = [id for p in pieces for id in p.ids[p.start : p.stop]]
        positions, modality = _positions(pieces), _modality(pieces)
        write = [p.table[n // size] * size + n % size for p in pieces for n in range(p.start, p.stop)]
        offsets = torch.arange(size)
        deepest = max((len(p.table) for p in pieces[:rows]), default=0)
        longest = max((p.stop for p in pieces[:rows]), default=0)
        tables = torch.tensor([[*p.table, *[0] * (deepest - len(p.table))] for p in pieces[:rows]], dtype=torch.long)
        read = (tables.view(rows, deepest, 1) * size + offsets).view(rows, deepest * size)[:, :longest]
        lengths = torch.tensor([p.stop for p in pieces[:rows]], dtype=torch.long)
        seen = torch.arange(longest) < lengths[:, None]
        # Not other slots: a NaN that another sequence left there would reach the result in spite of the mask.
        read = torch.where(seen, read, read[:, :1])
        chunks, at, last = [], 0, []
        for piece in pieces:
            end = at + piece.stop - piece.start
            if not piece.decodes:
                slots = torch.tensor(piece.table, dtype=torch.long)[:, None] * size + offsets
                chunks.append((at, end, slots.flatten()[: piece.stop].to(device)))
            at = end
            last.append(end - 1)
        return cls(
            torch.tensor([tokens], device=device),
            positions.to(device),
            None if modality is None else modality.to(device),
            torch.tensor(write, device=device),
            rows,
            read.flatten().to(device),
            seen[:, None, None].to(device),
            tuple(chunks),
            torch.tensor(last, device=device),
        )


def _positions(pieces: Sequence[SequencePiece]) -> torch.Tensor:
    if all(p.vision is None for p in pieces):
        return torch.tensor([[n for p in pieces for n in range(p.start, p.stop)]])
    axes = [
        np.repeat(np.arange(p.start, p.stop)[:, None], 3, 1)
        if p.vision is None
        else p.vision.positions_in(p.start, p.stop)
        for p in pieces
    ]
    return torch.from_numpy(np.concatenate(axes)).long()[None]


def _modality(pieces: Sequence[SequencePiece]) -> torch.Tensor | None:
    if all(p.vision is None for p in pieces):
        return None
    kinds = np.concatenate(
        [
            np.zeros(p.stop - p.start, np.uint8) if p.vision is None else p.vision.modality_in(p.start, p.stop)
            for p in pieces
        ]
    )
    return torch.from_numpy(kinds)[None] if kinds.any() else None


class PagedAttention(InnerAttention):
    """Stores the step's keys and values, then computes each token's attention to its own sequence in the pool."""

    with_positions = False

    def __init__(self, cache: PagedCache, layer: int) -> None:
        super().__init__()
        self.cache, self.layer = cache, layer
        self.step: Step | None = None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: Context) -> torch.Tensor:
        """q [1, T, N, D], k and v [1, T, Nkv, D] -> [1, T, N, D]."""
        assert self.step is not None
        step, keys, values = self.step, self.cache.keys[self.layer], self.cache.values[self.layer]
        keys.index_copy_(0, step.write, k[0].to(keys.dtype))
        values.index_copy_(0, step.write, v[0].to(values.dtype))
        out = torch.empty_like(q[0])
        if step.rows:
            rows = q[0, : step.rows, :, None]  # [R, N, 1, D]
            # index_select: several times quicker than keys[read] on a CPU. [R * M, Nkv, D] -> [R, Nkv, M, D]
            near, far = (
                t.index_select(0, step.read).view(step.rows, -1, *t.shape[1:]).transpose(1, 2) for t in (keys, values)
            )
            out[: step.rows] = F.scaled_dot_product_attention(rows, near, far, step.seen, enable_gqa=True)[:, :, 0]
        for first, end, slots in step.chunks:
            out[first:end] = _ends_aligned(q[0, first:end], keys[slots], values[slots])
        return out[None]


def _ends_aligned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal, q [n, N, D] being the last n places of k and v [m, Nkv, D]."""
    n, m = q.shape[0], k.shape[0]
    seen = None if n == m else torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, enable_gqa=True)
    return out[0].transpose(0, 1)


def install(model: nn.Module, cache: PagedCache) -> list[PagedAttention]:
    """Every layer of `model` reads and writes `cache`; models that share weights may share it."""
    placed = []
    for layer, block in enumerate(model.layers):  # type: ignore[arg-type]
        assert isinstance(block.attn, Attention)
        placed.append(PagedAttention(cache, layer))
        block.attn.inner = placed[-1]
    return placed


def install_mtp(model: nn.Module, cache: PagedCache) -> PagedAttention:
    """The same for the first MTP layer, in a cache that has room for it."""
    inner = PagedAttention(cache, cache.mtp_layer)
    model.mtp[0].block.attn.inner = inner  # type: ignore[index,union-attr]
    return inner
