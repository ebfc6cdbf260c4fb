"""What fully_shard gathers, and in which precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from erniekit.data.collate import one_document
from erniekit.devices import pick
from erniekit.losses.causal import causal_loss
from erniekit.models import MODELS
from erniekit.models.config import MoEShape
from erniekit.parallel.apply import SpreadOptions, parallelise
from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from erniekit.parallel.sharding_table import sharding_of
from support.ranks import Ranks
from support.tiny_config import with_experts

pytestmark = pytest.mark.xdist_group("ranks")


def computed_in(axes: dict[str, Any]) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """The dtype of each kind of weight in use, in a model that computes in bf16; and what this rank learns."""
    moe = MoEShape(experts=4, choices=2, width=8, shared_width=8, start=0, end=0)
    config = with_experts(
        moe, vocab_size=31, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1
    )
    layout, rank = Layout(**axes), torch.distributed.get_rank()
    spec = MODELS.get("ernie4_5_moe")
    with torch.device("meta"):
        model: Any = spec.build(config)
    sharding = sharding_of(model, spec.plan, layout)
    engine = parallelise(
        model, sharding, World(layout, rank), pick("cpu"), torch.bfloat16, causal_loss,
        lambda name, piece: piece.normal_(0, 0.1), one_document, SpreadOptions(),
    )  # fmt: skip
    seen: dict[str, str] = {}
    mlp = model.layers[0].mlp
    held = {"router": mlp.router, "experts": mlp.experts.gate_up, "shared": mlp.shared.gate_up}
    for name, called in (("router", mlp.router), ("experts", mlp.experts), ("shared", mlp.shared.gate_up)):
        called.register_forward_hook(lambda *_, name=name: seen.update({name: str(held[name].weight.dtype)}))
    engine.train()
    engine.forward_backward([one_document(torch.arange(1, 9)[None], 8)], [8.0])
    grads = {n: tuple(p.to_local().shape) for n, p in model.named_parameters() if p.grad is not None}
    return seen, grads


@pytest.mark.parametrize("axes", [dict(fsdp=2), dict(fsdp=2, experts="data")], ids=["experts whole", "experts dealt"])
def test_the_router_is_gathered_in_fp32_and_the_rest_in_the_compute_dtype(axes: dict[str, Any], ranks: Ranks) -> None:
    for seen, grads in ranks.run(2, computed_in, axes):
        assert seen == {"router": "torch.float32", "experts": "torch.bfloat16", "shared": "torch.bfloat16"}
        assert grads["layers.0.mlp.experts.down.weight"] == (4 * 16 // 2, 8), "half of the rows, whichever way"
        assert "layers.0.mlp.router.weight" in grads
        assert "layers.0.mlp.router.bias" not in grads
