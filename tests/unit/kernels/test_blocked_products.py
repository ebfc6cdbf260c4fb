"""Products in blocks of rows give what the loop over experts gives, for any number of rows an expert has."""

from __future__ import annotations

import pytest
import torch

from erniekit.kernels.blocked_products import BLOCK, blocked_outer, blocked_product, blocks_of
from erniekit.kernels.grouped_gemm import outer_reference, product_reference

# Rows of each expert, and rows that belong to none.
SIZES = [
    ([3, 0, 5, 1], 0),
    ([BLOCK, BLOCK + 1, BLOCK - 1, 0], 7),
    ([0, 0, 0, 4 * BLOCK], 0),
    ([0, 0], 5),
    ([200, 1, 1, 1, 1, 1], 64),
]


def made(sizes: list[int], beyond: int, *widths: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(sum(sizes))
    rows = [torch.randn(sum(sizes) + beyond, width, generator=draw, dtype=torch.float64) for width in widths]
    return *rows, torch.tensor(sizes).cumsum(0).to(torch.int32)


@pytest.mark.parametrize(("sizes", "beyond"), SIZES)
def test_a_product_in_blocks_is_the_loops(sizes: list[int], beyond: int) -> None:
    rows, ends = made(sizes, beyond, 6)
    weight = torch.randn(len(sizes), 6, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(blocked_product(rows, weight, ends), product_reference(rows, weight, ends))


@pytest.mark.parametrize(("sizes", "beyond"), SIZES)
def test_outer_products_in_blocks_are_the_loops(sizes: list[int], beyond: int) -> None:
    left, right, ends = made(sizes, beyond, 6, 10)
    torch.testing.assert_close(blocked_outer(left, right, ends), outer_reference(left, right, ends))


def test_shapes_do_not_depend_on_how_rows_are_dealt() -> None:
    """Which is why the host need not wait: the same count for every routing, and room for the worst."""
    for sizes in ([300, 0, 0], [100, 100, 100], [1, 298, 1]):
        blocks = blocks_of(300, torch.tensor(sizes).cumsum(0).to(torch.int32))
        assert blocks.number == 300 // BLOCK + 3
        assert int(blocks.place.max()) < blocks.number * BLOCK
        assert blocks.place.unique().numel() == 300
