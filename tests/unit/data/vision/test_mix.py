"""Picture and text steps in one stream, and ERNIEKit's order of rows."""

from __future__ import annotations

import numpy as np
import pytest

from erniekit.data.mix import SampleOrder
from erniekit.data.pack import PackStream
from erniekit.data.vision.mix import CompatVisionOrder, ModalStream
from erniekit.errors import ConfigError


def streams(ratio, text_first=False, per_step=3) -> ModalStream:
    made = [
        PackStream(SampleOrder([n], [1.0], seed=s, shuffle=True), [np.full(n, 10)], 10) for s, n in enumerate((50, 20))
    ]
    return ModalStream(made[0], made[1], 1, per_step, ratio, text_first)


@pytest.mark.parametrize(
    ("ratio", "text_first", "told"),
    [
        ((1, 1), True, "TPTPTP"),
        ((3, 2), True, "TTPPPTTPPP"),
        ((1, 1), False, "PTPTPT"),
        ((3, 1), False, "PPPTPPPT"),
        ((1, 0), False, "PPPP"),
        ((1, 0.5), False, "PPTPPT"),
    ],
)
def test_whole_steps_alternate(ratio, text_first: bool, told: str) -> None:
    stream = streams(ratio, text_first)
    kinds = ["".join("PT"[s] for s, _ in (stream[k * 3 + j][0] for j in range(3))) for k in range(len(told))]
    assert kinds == [3 * letter for letter in told]


def test_neither_stream_loses_or_repeats_a_pack() -> None:
    stream = streams((2, 1))
    packs = [stream[p] for p in range(90)]
    pictures = [pack for pack in packs if pack[0][0] == 0]
    text = [[(s - 1, i) for s, i in pack] for pack in packs if pack[0][0] == 1]
    assert pictures == [stream.pictures[k] for k in range(60)]
    assert text == [stream.text[k] for k in range(30)]
    assert stream.count_packs(1) == 75


def test_a_ratio_that_is_none_is_refused() -> None:
    for ratio in ((1,), (0, 0), (1, -1)):
        with pytest.raises(ConfigError):
            streams(ratio)


def test_the_old_order_is_what_its_reader_draws() -> None:
    rows = [np.array([0, -1, 1, 2, 3]), np.arange(8)]
    order = CompatVisionOrder(rows, [0.7, 0.3])

    drawn: list[tuple[int, int]] = []
    state = np.random.get_state()
    try:  # the reader's own loop, with numpy's global generator as it uses it
        held = [list(row) for row in rows]
        walks: dict[int, list[int]] = {}
        for _ in range(4):
            np.random.seed(hash(hash(87) * 1e3 + hash(0)) & 0x7FFFFFFF)
            sources = [s for s, share in enumerate((0.7, 0.3)) for _ in range(int(share * 13))]
            np.random.shuffle(sources)
            for s in sources:
                if not walks.get(s):
                    np.random.seed(97)
                    np.random.shuffle(held[s])
                    walks[s] = list(held[s])
                drawn.append((s, walks[s].pop(0)))
    finally:
        np.random.set_state(state)
    source, index = order.take(0, len(drawn))
    assert list(zip(source.tolist(), index.tolist())) == drawn
    assert order.epoch_size() == len(drawn) // 4
    part = order.take(17, 9)
    assert part[1].tolist() == [i for _, i in drawn[17:26]]
