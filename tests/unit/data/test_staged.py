"""Mixtures that change at named packs, and rows in the order of their difficulty: pure functions of the pack number."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from erniekit.config.mix_schedule import stages_of
from erniekit.data.mix import SampleOrder
from erniekit.data.pack import PackStream
from erniekit.data.staged import StagedPacks, difficulties
from erniekit.errors import ConfigError, DataError

SIZES = (300, 200)
LENGTHS = [np.full(n, 10, np.int32) for n in SIZES]


def order_of(shares: Sequence[float], drawn: Sequence[int]) -> SampleOrder:
    return SampleOrder(SIZES, shares, seed=7, drawn=drawn)


def staged(stages: list[tuple[int, Sequence[float]]]) -> StagedPacks:
    return StagedPacks(stages, order_of, LENGTHS, 20, buffer_size=50)


def shares(stream: PackStream, first: int, last: int) -> float:
    """Of the first source, in these packs."""
    drawn = Counter(source for pack in range(first, last) for source, _ in stream[pack])
    return drawn[0] / sum(drawn.values())


def test_shares_change_at_the_named_pack_and_rows_go_on_where_they_were() -> None:
    stream = staged([(0, (1, 0)), (50, (0.5, 0.5)), (100, (0, 1))])
    assert shares(stream, 0, 50) == 1
    assert shares(stream, 50, 100) == pytest.approx(0.5, abs=0.1)
    assert shares(stream, 100, 120) == 0
    met = [member for pack in range(120) for member in stream[pack]]
    assert len(met) == len(set(met)), "no row comes twice within a pass: 150 of 300, 90 of 200"


def test_any_pack_can_be_asked_for_first() -> None:
    stages = [(0, (0.9, 0.1)), (40, (0.2, 0.8))]
    walked = [staged(stages)[pack] for pack in range(90)]
    jumped = staged(stages)
    assert [jumped[pack] for pack in reversed(range(90))] == walked[::-1]


def test_before_the_first_change_packs_are_those_of_the_plain_mixture() -> None:
    stream, plain = staged([(0, (0.9, 0.1)), (40, (0.2, 0.8))]), PackStream(
        order_of((0.9, 0.1), ()), LENGTHS, 20, buffer_size=50
    )  # fmt: skip
    assert [stream[pack] for pack in range(40)] == [plain[pack] for pack in range(40)]
    assert stream.count_packs(1) == plain.count_packs(1)


def test_rows_are_ordered_in_the_first_passes_and_shuffled_later() -> None:
    keys = np.random.default_rng(0).integers(0, 40, 100)
    order = SampleOrder([100], seed=1, keys=[keys], ordered_passes=1)
    first, second = (keys[order.take(start, 100)[1]] for start in (0, 100))
    assert (np.diff(first) >= 0).all()
    assert not (np.diff(second) >= 0).all()
    always = SampleOrder([100], seed=1, keys=[keys])
    index = always.take(100, 100)[1]
    assert (np.diff(keys[index]) >= 0).all()
    equal = index[keys[index] == keys[index][50]]
    assert len(equal) > 1
    in_file_order = SampleOrder([100], seed=1, shuffle=False, keys=[keys]).take(0, 100)[1]
    assert in_file_order.tolist() == np.argsort(keys, kind="stable").tolist()
    assert sorted(index.tolist()) == list(range(100)), "every row once a pass"


def test_a_column_of_numbers_is_read_for_the_rows_that_became_samples(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"src": "a", "hard": value}) for value in (3, 0.5, "x", 2)))
    assert difficulties(str(file), "hard", [1, 2, 4, 4]).tolist() == [3, 0.5, 2, 2]
    with pytest.raises(DataError, match="curriculum: hard is not a number in this row") as raised:
        difficulties(str(file), "hard", [3])
    assert raised.value.where == f"{file}:3"
    with pytest.raises(DataError) as raised:
        difficulties(str(file), "difficulty", [1])
    assert raised.value.fix == "curriculum: length, or one of its columns: hard, src"


@pytest.mark.parametrize("words", [["abc"], ["5"], ["0=1/1"], ["5=0/0"], ["5=1/-1"], ["5=1/1", "5=1/2"], ["5=nan/1"]])
def test_stages_that_mean_nothing_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        stages_of(words)
    assert stages_of(["1=1/0", "500=0.5/0.5"]) == ((1, (1.0, 0.0)), (500, (0.5, 0.5)))
