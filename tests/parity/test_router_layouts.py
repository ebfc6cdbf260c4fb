"""Router losses, the balancing bias and further-token losses are those of one process in every layout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from erniekit.config import load
from erniekit.data.collate import collate, one_document
from erniekit.devices import pick
from erniekit.losses.causal import causal_loss
from erniekit.models import MODELS
from erniekit.models.config import DecoderConfig, MoEShape
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.schedule import Schedule
from erniekit.parallel.apply import SpreadOptions, parallelise
from erniekit.parallel.gradients import local
from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from erniekit.parallel.sharding_table import plain, sharding_of
from erniekit.parallel.step_metrics import StepMetrics
from erniekit.recipes import expert_layers, expert_settings, trained_weights
from erniekit.train.step import TrainStep
from parity.test_layouts import LENGTH, packs, whole_value
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

STEPS = 5
CONFIG = DecoderConfig(
    family="ernie4_5_moe", vocab_size=61, hidden_size=32, intermediate_size=40, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5, rope_theta=1e4, rope_style="pairs", tie_word_embeddings=True,
    max_positions=128, moe=MoEShape(experts=6, choices=2, width=16, shared_width=16, start=1, end=2), mtp_layers=1,
)  # fmt: skip
# Large enough to be seen in every number below.
WORDS = [
    "fine_tuning=Full", "moe_aux_loss_lambda=0.1", "moe_z_loss_lambda=0.01", "moe_orthogonal_loss_lambda=0.2",
    "moe_use_aux_free_update_coef=0.01", "num_nextn_predict_layers=1",
]  # fmt: skip


def train(axes: dict[str, Any], words: list[str]) -> dict[str, Any]:
    layout = Layout(**axes)
    rank = torch.distributed.get_rank() if layout.size > 1 else 0
    world, spec, device, cfg = World(layout, rank), MODELS.get("ernie4_5_moe"), pick("cpu"), load(words)
    with torch.device("meta"):
        model = spec.build(CONFIG)
    trained_weights.set_mtp(cfg, model)
    sharding = sharding_of(model, spec.plan, layout)

    def fill(name: str, piece: torch.Tensor) -> None:
        whole = whole_value(name, sharding.shape(name))
        for box in sharding.boxes(name, rank):
            piece[box.local_slices] = whole[box.global_slices]

    engine = parallelise(
        model, sharding, world, device, torch.float32, causal_loss, fill, one_document, SpreadOptions()
    )
    engine.step_metrics = StepMetrics(expert_settings.metric_names(cfg, CONFIG), device.handle)
    expert_layers.install(cfg, engine)
    named = [(plain(n), p) for part in engine.parts for n, p in part.named_parameters()]
    built: Any = SimpleNamespace(
        folder=SimpleNamespace(config=CONFIG), world=world, engine=engine, sharding=sharding, parameters=lambda: named
    )
    balance = expert_layers.balance_hook(cfg, built)
    assert balance is not None
    trained = [(n, p) for n, p in named if p.requires_grad]
    step = TrainStep(engine, AdamW(make_groups(trained, 3, 0.1), (0.9, 0.95), 1e-6), Schedule("constant", 1e-3, 99))
    results = []
    for k in range(1, STEPS + 1):
        mine = packs(k)[layout.data_rank(rank) :: layout.data_ranks]
        launched = step.launch([collate([pack], pad_to=LENGTH, ahead=1) for pack in mine], k)
        balance.launched(None, launched)  # type: ignore[arg-type]
        results.append(launched.result())
        balance.after_step(None, results[-1])  # type: ignore[arg-type]
    pieces = {
        name: [(box.global_slices, local(param.detach())[box.local_slices].clone()) for box in boxes]
        for name, param in named
        if (boxes := dict(sharding.holders(name)).get(rank, ()))
    }
    return {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "extras": [r.extras for r in results],
        "loads": balance.metrics(),
        "pieces": pieces,
    }


_alone: dict[str, Any] = {}


def alone() -> dict[str, Any]:
    return _alone.setdefault("run", train({}, WORDS))


@pytest.mark.parametrize(
    "axes",
    [
        {"dp": 2},
        {"tp": 2, "sequence_parallel": True},
        pytest.param({"fsdp": 2, "sharding_stage": 3}, marks=pytest.mark.full),
        pytest.param({"cp": 2}, marks=pytest.mark.full),
        pytest.param({"pp": 2}, marks=pytest.mark.full),
        pytest.param({"tp": 2}, marks=pytest.mark.full),
        pytest.param({"cp": 2, "tp": 2, "sequence_parallel": True}, marks=pytest.mark.full),
        pytest.param({"fsdp": 2, "cp": 2}, marks=pytest.mark.full),
        pytest.param({"pp": 2, "dp": 2}, marks=pytest.mark.full),
    ],
    ids=lambda axes: "-".join(f"{k}{v}" for k, v in axes.items()),
)
def test_a_layout_changes_neither_router_losses_nor_bias_nor_further_losses(ranks: Ranks, axes: dict[str, Any]) -> None:
    one = alone()
    answers = ranks.run(Layout(**axes).size, train, axes, WORDS)
    for answer in answers:
        assert answer["losses"] == pytest.approx(one["losses"], abs=1e-6)
        assert answer["norms"] == pytest.approx(one["norms"], rel=1e-5)
        assert answer["loads"] == one["loads"]
        for told, expected in zip(answer["extras"], one["extras"]):
            assert told == pytest.approx(expected, abs=1e-5)
    for name, boxes in one["pieces"].items():
        whole = torch.full_like(boxes[0][1], float("nan"))
        for answer in answers:
            for where, value in answer["pieces"].get(name, ()):
                whole[where] = value
        # Adam's first steps divide by the gradient's own size, so that rounding weighs more than in the loss.
        tolerance = 0.0 if name.endswith("router.bias") else 2e-5
        assert float((whole - boxes[0][1]).abs().max()) <= tolerance, name


@pytest.mark.full
def test_each_of_them_makes_a_difference_that_the_layouts_could_miss() -> None:
    one = alone()
    assert set(one["extras"][0]) == {"router_aux", "router_z", "router_ortho", "mtp_loss"}
    for left_out in ("moe_aux_loss_lambda=0", "moe_z_loss_lambda=0", "moe_orthogonal_loss_lambda=0"):
        words = [w for w in WORDS if w.partition("=")[0] != left_out.partition("=")[0]]
        other = train({}, [*words, left_out])
        assert other["losses"][0] == one["losses"][0]
        assert max(abs(a - b) for a, b in zip(one["losses"], other["losses"])) > 1e-5, left_out
    start = whole_value("layers.1.mlp.router.bias", (6,))
    moved = one["pieces"]["layers.1.mlp.router.bias"][0][1] - start
    assert float(moved.abs().max()) >= 0.01
