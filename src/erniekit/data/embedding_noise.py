"""NEFTune: what is drawn of each token of a batch, so that the model can add noise to its embedding.

A token's noise depends on the run's seed, the number of its pack and its place in it, and on nothing else: a resumed
run and every layout draw the same. Its size is alpha / sqrt(length x hidden size), of the token's own document: padding
and other documents of the pack do not count. Made by recipes/datasets.py; loader.py calls it, and
kernels/embedding_noise.py draws.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from erniekit.data.types import Batch, EmbeddingNoise, Pack

STRIDE = 0x9E3779B1  # an odd factor of a token's place in its pack


@dataclass(frozen=True)
class NoiseMaker:
    alpha: float
    hidden_size: int
    seed: int

    def __call__(self, batch: Batch, packs: Sequence[Pack]) -> Batch:
        """The batch made of these packs, one a row or all in one row, with its noise."""
        keys = np.zeros(tuple(batch.input_ids.shape), dtype=np.int32)
        sizes = np.zeros(keys.shape, dtype=np.float32)
        joined, start = len(keys) < len(packs), 0
        for number, pack in enumerate(packs):
            row = 0 if joined else number
            lengths = np.array([len(sample.ids) for sample in pack.samples])
            stop = start + int(lengths.sum())
            keys[row, start:stop] = self._keys(pack.index, stop - start)
            sizes[row, start:stop] = np.repeat(self.alpha / np.sqrt(lengths * self.hidden_size), lengths)
            start = stop if joined else 0
        return replace(batch, noise=EmbeddingNoise(torch.from_numpy(keys), torch.from_numpy(sizes)))

    def _keys(self, pack: int, count: int) -> np.ndarray:
        digest = hashlib.blake2b(f"neftune/{self.seed}/{pack}".encode(), digest_size=4).digest()
        places = np.arange(count, dtype=np.uint64) * np.uint64(STRIDE)
        numbers = places + np.uint64(int.from_bytes(digest, "little"))
        return (numbers & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
