"""NEFTune's noise: its size, and that nothing but seed, pack and place in the pack decides it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from erniekit.data.collate import collate, collate_joined
from erniekit.data.embedding_noise import NoiseMaker
from erniekit.data.types import Batch, Pack, Sample
from erniekit.kernels.embedding_noise import with_noise
from erniekit.parallel.context import split, take

HIDDEN = 64
MAKE = NoiseMaker(alpha=5.0, hidden_size=HIDDEN, seed=1)


def pack(number: int, *lengths: int) -> Pack:
    return Pack(tuple(Sample(*(np.arange(1, n + 1, dtype=np.int32),) * 2) for n in lengths), number)


def noise(batch: Batch) -> torch.Tensor:
    assert batch.noise is not None
    return with_noise(torch.zeros(*batch.input_ids.shape, HIDDEN), *batch.noise)


def test_noise_is_uniform_up_to_alpha_over_the_root_of_length_times_hidden_size() -> None:
    packs = [pack(0, 100, 25)]
    drawn = noise(MAKE(collate(packs, pad_to=160), packs))[0]
    for start, stop in ((0, 100), (100, 125)):  # of each document by its own length: the paper's L
        most = 5.0 / (HIDDEN * (stop - start)) ** 0.5
        part = drawn[start:stop] / most
        assert float(part.abs().max()) <= 1
        assert float(part.std()) == pytest.approx(3**-0.5, rel=0.05)
        assert float(part.mean()) == pytest.approx(0, abs=0.05)
    assert not drawn[125:].any(), "padding has none"
    assert drawn[:125].flatten().unique().numel() > 0.99 * 125 * HIDDEN


def test_noise_is_of_the_pack_whatever_rows_it_shares_a_batch_with() -> None:
    one, other = pack(3, 10, 6), pack(4, 12)
    both = noise(MAKE(collate([one, other], pad_to=24), [one, other]))
    alone = noise(MAKE(collate([other], pad_to=16), [other]))
    torch.testing.assert_close(both[1, :12], alone[0, :12], rtol=0, atol=0)
    joined = noise(MAKE(collate_joined([one, other], lengths=[32]), [one, other]))
    torch.testing.assert_close(joined[0, :28], torch.cat((both[0, :16], both[1, :12])), rtol=0, atol=0)
    again = noise(MAKE(collate([pack(5, 12)], pad_to=16), [pack(5, 12)]))
    assert not torch.equal(again[0, :12], alone[0, :12]), "another pack, or the same rows in another epoch"


def test_ranks_that_share_a_sequence_have_their_parts_of_the_noise() -> None:
    packs = [pack(0, 30)]
    batch = MAKE(collate(packs, pad_to=32), packs)
    for rank in (0, 1):
        torch.testing.assert_close(noise(split(batch, rank, 2)), take(noise(batch), rank, 2), rtol=0, atol=0)
