"""Where a rank's part of a tensor lies, as its optimiser is told."""

from __future__ import annotations

import pytest
import torch

from erniekit.recipes.optimiser import block_of, place_of
from support.fake_sharding import FakeSharding, Held

CPU = torch.device("cpu")


def cut(columns: int, *held: Held, rows: int = 10) -> FakeSharding:
    return FakeSharding({"w": (rows, columns)}, {"w": list(held)})


def test_rows_and_columns_are_numbered_as_in_the_whole_tensor() -> None:
    others = Held(((0, 2), (4, 8)), ((256, 512),))
    sharding = cut(512, Held(((2, 4), (8, 10)), ((256, 512),)), Held(((0, 10),), ((0, 256),)), others)
    place = place_of("w", sharding, 0, 1, CPU)  # type: ignore[arg-type]
    assert place.rows is not None
    assert place.rows.tolist() == [2, 3, 8, 9]
    assert (place.first_column, place.block) == (256, 256)
    whole = place_of("w", sharding, 1, 1, CPU)  # type: ignore[arg-type]
    assert whole.rows is None, "all of them, in order"
    assert whole.salt == place.salt


def test_a_tensor_of_one_dim_is_numbered_too_and_keeps_wide_moments() -> None:
    sharding = FakeSharding({"w": (10,)}, {"w": [Held(((0, 5),)), Held(((5, 10),))]})
    place = place_of("w", sharding, 1, 1, CPU)  # type: ignore[arg-type]
    assert place.rows is not None
    assert place.rows.tolist() == [5, 6, 7, 8, 9]
    assert place.block == 0


@pytest.mark.parametrize(("start", "want"), [(256, 256), (192, 64), (448, 64), (40, 0)])
def test_blocks_are_never_shared_by_two_ranks(start: int, want: int) -> None:
    halves = [Held(((0, 10),), ((0, start),)), Held(((0, 10),), ((start, 512),))]
    assert block_of("w", cut(512, *halves)) == want  # type: ignore[arg-type]
