"""How much data a step takes where the recipe leaves it to the size of the data."""

from __future__ import annotations

import pytest

from erniekit.recipes.datasets import accumulation_by_size


@pytest.mark.parametrize(
    ("samples", "packs", "at_once", "expected"),
    [
        (40, 40, 1, 8),
        (40, 10, 1, 2),  # four pairs a pack
        (500, 500, 2, 8),
        (5_000, 5_000, 1, 32),
        (50_000, 50_000, 1, 32),  # 64 wanted, 32 at most
        (200_000, 50_000, 8, 4),
        (50, 5, 4, 1),
    ],
)
def test_a_negative_accumulation_grows_with_the_data(samples, packs, at_once, expected):
    assert accumulation_by_size(samples, packs, at_once) == expected
