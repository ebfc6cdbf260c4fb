"""The few lengths that rows of every length are padded to."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from erniekit.data.buckets import MOST, WASTE, choose, fit, padding, sizes_of
from erniekit.data.mix import SampleOrder
from erniekit.data.pack import PackStream


def share(sizes: np.ndarray, lengths: tuple[int, ...]) -> float:
    return padding(sizes, lengths) / sizes.sum()


def test_rows_of_5_to_7_5k_need_six_lengths_to_stay_below_the_waste() -> None:
    sizes = np.random.default_rng(0).integers(5000, 7501, 4000)
    lengths = choose(sizes, int(sizes.max()))
    assert len(lengths) == 6
    assert share(sizes, lengths) <= WASTE
    assert all(length % 128 == 0 for length in lengths)


def test_sums_of_several_rows_need_fewer_lengths() -> None:
    rows = np.random.default_rng(0).integers(5000, 7501, (4000, 8))
    lengths = choose(rows.sum(1), 8 * 7500)
    assert len(lengths) <= 4
    assert share(rows.sum(1), lengths) <= WASTE
    assert lengths[-1] >= 8 * 7500, "rows that meet by chance fit too"


@pytest.mark.parametrize("number", [1, 2, 3])
def test_no_other_lengths_pad_less(number: int) -> None:
    sizes = np.random.default_rng(1).integers(1, 120, 60)
    candidates = sorted({-(-int(size) // 8) * 8 for size in sizes})
    best = min(
        padding(sizes, (*some, candidates[-1])) for some in itertools.combinations(candidates[:-1], number - 1)
    )  # fmt: skip
    assert padding(sizes, choose(sizes, int(sizes.max()), most=number, waste=0.0)) == best


def test_rows_of_one_length_have_one_bucket_and_wild_ones_at_most_eight() -> None:
    assert choose(np.full(50, 4000), 4000) == (4096,)
    wild = np.exp(np.random.default_rng(2).normal(6.5, 1.2, 3000)).clip(8, 8192).astype(np.int64)
    assert len(choose(wild, int(wild.max()))) == MOST


def test_lengths_are_multiples_of_what_the_layout_cuts_rows_into() -> None:
    assert all(length % 12 == 0 for length in choose(np.arange(10, 200), 199, multiple=12))
    assert all(length % 384 == 0 for length in choose(np.arange(1000, 3000), 2999, multiple=12))


def test_a_row_takes_the_shortest_bucket_that_holds_it() -> None:
    assert [fit(size, (8, 16, 40)) for size in (1, 8, 9, 40)] == [8, 8, 16, 40]
    with pytest.raises(ValueError, match="41 tokens do not fit a row of 40"):
        fit(41, (8, 16, 40))


@pytest.mark.parametrize(("epochs", "want"), [(None, [3, 7]), (1, [3, 7, 5])])
def test_sizes_are_those_of_micro_batches_in_their_order_and_a_bounded_stream_ends_with_fewer_rows(
    epochs: int | None, want: list[int]
) -> None:
    order = SampleOrder([5], shuffle=False, strategy="concat")
    stream = PackStream(order, [np.arange(1, 6)], 8, packing=False, epochs=epochs)
    assert sizes_of(stream, 2).tolist() == want
