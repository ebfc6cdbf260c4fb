"""What a model is built with besides its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.config import load
from erniekit.devices import pick
from erniekit.models.layers.norm import RMSNorm
from erniekit.parallel.layout import Layout
from erniekit.recipes.rehearsal import built_for, prepare
from erniekit.rehearse.recorded_group import opened
from support.small_shape import DENSE, EXPERTS


@pytest.mark.parametrize(
    ("shape", "stage", "kept"), [(EXPERTS, "DPO", True), (EXPERTS, "SFT", False), (DENSE, "DPO", False)]
)
def test_norms_of_a_policy_with_experts_and_of_its_reference_keep_their_kernel(
    tmp_path: Path, shape: dict, stage: str, kept: bool
) -> None:
    """The compiler's sum a row in another order with gradients than without, and a router chooses otherwise."""
    (tmp_path / "config.json").write_text(json.dumps(shape))
    keys = dict(
        model_name_or_path=tmp_path, train_dataset_path="none.jsonl", max_seq_len=64, device="cpu", stage=stage,
        fine_tuning="LoRA",
    )  # fmt: skip
    cfg = load([f"{key}={value}" for key, value in keys.items()], "train")
    with opened(0, 1):
        model = built_for(prepare(cfg, Layout(), tmp_path, micro_batches=1), 0, pick("cpu")).built.engine.model
    norms = [layer.attn_norm for layer in model.layers] + [layer.mlp_norm for layer in model.layers]
    assert all(isinstance(norm, RMSNorm) for norm in norms)
    assert [norm.keeps_kernel for norm in norms] == [kept] * 4
