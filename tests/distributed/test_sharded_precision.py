"""A run in bf16 starts from the same masters, sharded or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from erniekit.demo.tiny import TRAIN, make_tiny_model
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")
STAGE3 = dict(sharding="stage3", sharding_parallel_degree=2)


def masters(model: str, output: str, keys: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What an optimiser's fp32 weights are before the first step, by name; and the weights that are not trained."""
    from erniekit.config import load
    from erniekit.recipes import build
    from erniekit.recipes.optimiser import make_optimizer
    from erniekit.recipes.run_plan import plan_run
    from erniekit.recipes.stage import TrainingStage

    words = dict(
        model_name_or_path=model, train_dataset_path=str(TRAIN), output_dir=output, stage="SFT", compute_type="bf16",
        max_seq_len=64, max_steps=1, report_to="none", device="cpu", gradient_accumulation_steps=2,
    )  # fmt: skip
    plan = plan_run(load([f"{key}={value}" for key, value in {**words, **keys}.items()]))
    built = build.build(plan, TrainingStage())
    optimizer = make_optimizer(plan.config, built)
    frozen = {name: param for name, param in built.parameters() if not param.requires_grad}
    return whole(optimizer.masters), whole(frozen)


def whole(held: dict[str, Any]) -> dict[str, torch.Tensor]:
    values = {name: value.detach() for name, value in held.items()}
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for name, v in values.items()}


@pytest.mark.parametrize("tuning", ["Full", "LoRA"])
def test_masters_and_frozen_weights_of_a_sharded_run_are_those_of_one_rank(
    tuning: str, ranks: Ranks, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", family="ernie4_5_moe")  # fp32: there is something to round
    keys = dict(fine_tuning=tuning)
    ((one, frozen),) = ranks.run(1, masters, str(model), str(tmp_path / "one"), keys)
    for sharded, others in ranks.run(2, masters, str(model), str(tmp_path / "two"), {**keys, **STAGE3}):
        for got, want in ((sharded, one), (others, frozen)):
            assert got.keys() == want.keys()
            for name, value in want.items():
                assert got[name].dtype == value.dtype, name
                assert torch.equal(got[name], value), name
    assert "layers.0.attn.qkv.weight" in (frozen if tuning == "LoRA" else one)
    router = [value for name, value in {**frozen, **one}.items() if ".router.weight" in name]
    assert all(not torch.equal(value, value.bfloat16().float()) for value in router), "kept in fp32 throughout"
