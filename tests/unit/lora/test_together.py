"""Which parts of our tensors an adapter's file holds: all of it, bit for bit, or another way of writing is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from erniekit.lora.adapter import adapter_of
from erniekit.lora.inject import inject, lora_state
from erniekit.lora.peft_files import peft_tensors
from erniekit.lora.settings import LoRASettings
from erniekit.lora.together import adapter_files

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"shared_a": True},
    "lengths": {"dora": True, "targets": ATTENTION},
    "some": {"targets": ["q_proj", "down_proj"]},
}


def empty(model: nn.Module, settings: LoRASettings) -> nn.Module:
    """As a run has it before its weights are spread."""
    with torch.device("meta"):
        out = type(model)(model.config)
    inject(out, settings, seed=0)
    return out


@pytest.mark.parametrize("family", ["ernie", "llama", "moe"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_of_the_file_is_cut_out_of_one_of_ours(
    request: pytest.FixtureRequest, trained: Any, family: str, kind: str
) -> None:
    base, settings = request.getfixturevalue(family), LoRASettings.resolve(rank=3, **KINDS[kind])
    files = adapter_files(empty(base, settings), settings, "hf")
    assert files is not None
    model = trained(base, settings)
    want, ours = peft_tensors(adapter_of(model, settings), model), lora_state(model)
    got = {n: t for e in files.entries for n, t in zip(e.theirs, e.write(ours[e.ours].detach()), strict=True)}
    assert {e.ours for e in files.entries} == ours.keys()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(
    ("family", "layout", "kind"),
    [
        ("ernie", "paddle", {}),  # A and B of several projections joined
        ("ernie", "hf", {"pissa": True}),  # joined to what they began as
        ("moe", "hf", {"targets": [r".*\.experts\..*\.up_proj"]}),  # zeros for down_proj
    ],
)
def test_a_file_of_more_than_parts_of_ours_is_left_to_one_rank(
    request: pytest.FixtureRequest, family: str, layout: str, kind: dict[str, Any]
) -> None:
    settings = LoRASettings.resolve(rank=3, **kind)
    assert adapter_files(empty(request.getfixturevalue(family), settings), settings, layout) is None
