"""Stored tensors that have one value for several neighbouring columns of a parameter: the scales of 8-bit moments.

Used by gather.py, collective.py and compress.py. Their names end in `#<columns>` (`layers.0.w/exp_avg_scale#256`), and
they are cut between ranks as their parameter is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from erniekit.parallel.sharding import Box, Sharding


def param_of(name: str) -> str:
    """Of `<parameter>/<state>` and the like."""
    return name.partition("/")[0]


def columns_a_value(name: str) -> int:
    found = re.search(r"#(\d{1,6})(?:/|$)", name)
    return max(1, int(found[1])) if found else 1


def stored_shape(sharding: Sharding, name: str) -> tuple[int, ...]:
    shape, block = tuple(sharding.shape(param_of(name))), columns_a_value(name)
    return (*shape[:-1], -(-shape[-1] // block))


def stored_boxes(boxes: Sequence[Box], name: str) -> tuple[Box, ...]:
    """Of a parameter's boxes those of the stored tensor. A rank whose columns begin or end inside a block has that
    block's value, too: several ranks may read one, and none that writes shares one."""
    block = columns_a_value(name)
    if block == 1:
        return tuple(boxes)
    out = []
    for box in boxes:
        columns = box.global_slices[-1]
        first, last = columns.start // block, -(-columns.stop // block)
        there, here = (*box.global_slices[:-1], slice(first, last)), (*box.local_slices[:-1], slice(0, last - first))
        out.append(type(box)(there, here))
    return tuple(out)


def local_shape(sharding: Sharding, name: str, rank: int) -> tuple[int, ...]:
    param, shape = param_of(name), tuple(sharding.local_shape(param_of(name), rank))
    if columns_a_value(name) == 1:
        return shape
    boxes = stored_boxes(sharding.boxes(param, rank), name)
    return (*shape[:-1], boxes[0].local_slices[-1].stop if boxes else 0)
