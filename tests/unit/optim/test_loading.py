"""8-bit moments read under a layout whose columns begin inside a block of the stored scales."""

from __future__ import annotations

import pytest
import torch

from erniekit.kernels import moments8
from erniekit.kernels.position_noise import TensorPart, draws
from erniekit.optim.loading import load_moments
from erniekit.optim.storage import MOMENTS, SCALES, Storage, stored_name


@pytest.mark.parametrize("first", [0, 64, 256, 320])
def test_columns_that_begin_inside_a_stored_block_are_packed_anew(first: int) -> None:
    random = torch.Generator().manual_seed(0)
    root = torch.randn(5, 448, generator=random).exp() * 1e-3
    m, v = torch.randn(5, 448, generator=random) * root, root.square()
    whole = TensorPart(3)
    *codes, scales = moments8.encode(m, v, draws(whole, torch.tensor(1.0), 5, 448, 1), 256)
    stored_m, stored_v = moments8.decode(codes[0], codes[1], scales, 256)
    last = min(448, first + 128)
    stored = {f"w/{key}": code[:, first:last] for key, code in zip(MOMENTS, codes)}
    blocks = slice(first // 256, -(-last // 256))
    stored |= {stored_name("w", key, 256): scale[:, blocks] for key, scale in zip(SCALES, scales)}
    mine = TensorPart(3, first_column=first, block=64)
    kinds = Storage("8bit").state_kinds((5, last - first), mine)
    state = {key: torch.zeros(shape, dtype=dtype) for key, (shape, dtype) in kinds.items()} | {"step": torch.ones(())}
    assert load_moments("w", state, mine, stored)
    got = moments8.decode(
        state[MOMENTS[0]], state[MOMENTS[1]], moments8.Scales(*(state[key] for key in SCALES)), mine.block
    )
    # Blocks of 64 are finer than those of 256: hardly more is lost than was already.
    assert float((got[1] / stored_v[:, first:last] - 1).abs().max()) < 0.06
    assert float(((got[0] - stored_m[:, first:last]) / stored_v[:, first:last].sqrt()).abs().max()) < 0.05


def test_without_its_moments_a_parameter_is_named() -> None:
    state = {key: torch.zeros(2) for key in MOMENTS} | {"step": torch.ones(())}
    assert not load_moments("w", state, TensorPart(block=0), {"w/exp_avg": torch.zeros(2)})
