"""Scales of 8-bit moments are cut between ranks as their parameter is."""

from __future__ import annotations

from erniekit.checkpoint.blocks import columns_a_value, local_shape, param_of, stored_boxes, stored_shape
from support.fake_sharding import FakeSharding, Held

SHARDING = FakeSharding(
    {"w": (10, 600)},
    {"w": [Held(((0, 4), (8, 10)), ((0, 256),)), Held(((4, 8),), ((256, 600),)), Held(((0, 10),), ((192, 384),))]},
)
SCALE = "w/exp_avg_scale#256/@optimizer"


def test_a_name_says_how_many_columns_a_value_stands_for() -> None:
    assert columns_a_value("w/exp_avg_scale#256") == 256
    assert columns_a_value(SCALE) == 256
    assert columns_a_value("w/exp_avg") == 1
    assert columns_a_value("layers.0.#odd/exp_avg#0") == 1
    assert param_of(SCALE) == "w"


def test_shapes_and_boxes_follow_the_parameters() -> None:
    assert stored_shape(SHARDING, "w/exp_avg") == (10, 600)  # type: ignore[arg-type]
    assert stored_shape(SHARDING, SCALE) == (10, 3)  # type: ignore[arg-type]
    for rank, (columns, shape) in enumerate([((0, 1), (6, 1)), ((1, 3), (4, 2)), ((0, 2), (10, 2))]):
        assert local_shape(SHARDING, SCALE, rank) == shape  # type: ignore[arg-type]
        boxes = stored_boxes(SHARDING.boxes("w", rank), SCALE)
        assert {(box.global_slices[1].start, box.global_slices[1].stop) for box in boxes} == {columns}
        assert all(box.local_slices[1] == slice(0, columns[1] - columns[0]) for box in boxes)
        rows = [box.global_slices[0] for box in boxes]
        assert rows == [box.global_slices[0] for box in SHARDING.boxes("w", rank)]
