"""What tower and resampler keep for backward, against what a forward pass saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from erniekit.models import vision_costs
from erniekit.models.layers.vision_language import VisionLanguageDecoder
from unit.models.test_modal import SHAPE, replace_vision

CONFIG = replace_vision(SHAPE, depth=3, width=64, heads=4, mlp_width=256, patch=14)
GRIDS = [(1, 8, 8)] * 4
PATCHES = 256


def saved(model: Any, forward: Callable[[], Any]) -> int:
    """Bytes, weights apart."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found, kept = dict[int, int](), list[torch.Tensor]()

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)  # or its memory is another's before the pass is over
        if x.untyped_storage().data_ptr() not in weights:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        answer = forward()
    assert answer.requires_grad
    return sum(found.values())


@pytest.mark.parametrize("tower", [True, False], ids=["both trained", "tower frozen"])
def test_a_forward_pass_keeps_what_is_counted(tower: bool) -> None:
    model = VisionLanguageDecoder(CONFIG)
    model.tower.requires_grad_(tower)
    pixels = torch.zeros(PATCHES, 588, dtype=torch.uint8)
    counted = saved(model, lambda: model.resampler(model.tower(pixels, GRIDS), GRIDS))
    wanted = vision_costs.kept_bytes(CONFIG, PATCHES, tower, True, again=False, each=4)
    assert counted == pytest.approx(wanted, rel=0.05)


def test_blocks_that_are_computed_again_keep_their_inputs_and_one_of_them_all() -> None:
    plain, again = (vision_costs.kept_bytes(CONFIG, 1, True, False, a, 1) for a in (False, True))
    assert plain - again == 3 * (10 * 64 + 3 * 256) - (3 * 64 + 10 * 64 + 3 * 256) + (10 - 1) * 64
    assert vision_costs.kept_bytes(CONFIG, PATCHES, False, False, False, 4) == 0
