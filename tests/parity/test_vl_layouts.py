"""A vision-language model answers and learns on many ranks as on one, though some of them read text alone.

Ten steps of real training of a tiny ERNIE-4.5-VL in each layout, against the same in one process. With two data ranks
every picture is read by the first of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from erniekit.data.collate import one_document
from erniekit.data.types import IGNORE, IMAGE, TEXT, VIDEO, Batch, Vision
from erniekit.devices import pick
from erniekit.lora.inject import inject
from erniekit.lora.settings import LoRASettings
from erniekit.losses.causal import causal_loss
from erniekit.losses.moe_balance import RouterLosses, RouterLossWeights
from erniekit.models import MODELS
from erniekit.models.config import BankShape, DecoderConfig, MoEShape, VisionShape
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.schedule import Schedule
from erniekit.parallel import compiled
from erniekit.parallel.apply import SpreadOptions, parallelise
from erniekit.parallel.gradients import local
from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from erniekit.parallel.sharding_table import plain, sharding_of
from erniekit.train.step import TrainStep
from parity.test_expert_layouts import named
from parity.test_layouts import assembled, whole_value
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

STEPS, ROWS, LENGTH = 6, 4, 32
DECAYED = (1 - 1e-3 * 0.1) ** STEPS  # what is left of a weight without gradient
SPEC = MODELS.get("ernie4_5_vl_moe")
SHAPE = DecoderConfig(
    family="ernie4_5_vl_moe", rms_norm_eps=1e-5, rope_theta=1e4, rope_style="pairs", max_positions=128,
    tie_word_embeddings=True, vocab_size=61, hidden_size=32, intermediate_size=40, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=8, mrope=(1, 1, 2),
    moe=MoEShape(8, 2, 12, 24, start=1, end=2, vision=BankShape(8, 6)),
    vision=VisionShape(depth=2, width=16, heads=2, mlp_width=24, patch=2),
)  # fmt: skip


def row(step: int, number: int, pictures: bool) -> Batch:
    """Two documents and padding; the first shows a picture of 4 x 4 patches, the second a video of two such frames."""
    draw = torch.Generator().manual_seed(100 * step + number)
    ids = torch.randint(1, 61, (1, LENGTH), generator=draw)
    labels = torch.randint(1, 61, (1, LENGTH), generator=draw)
    first = int(torch.randint(9, 15, (1,), generator=draw))
    counted = torch.cat([torch.arange(n) for n in (first, 28 - first, 4)])
    positions = counted[:, None].expand(-1, 3).clone()
    modality = torch.full((LENGTH,), TEXT, dtype=torch.uint8)
    vision = None
    if pictures:
        grids, places = torch.tensor([[1, 4, 4], [2, 4, 4]]), []
        for start, kind in ((3, IMAGE), (first + 5, VIDEO)):
            modality[start - 1 : start + 5] = kind  # with the tokens around it
            places += range(start, start + 4)
            positions[start : start + 4] = positions[start] + torch.tensor([[0, r, c] for r in (0, 1) for c in (0, 1)])
        patches = torch.randint(0, 256, (48, 12), generator=draw, dtype=torch.uint8)
        vision = Vision(patches, grids, torch.tensor(places))
        labels[0, places] = IGNORE
    labels[0, 28:] = IGNORE
    real = torch.arange(LENGTH)[None] < 28
    bounds = torch.tensor([0, first, 28, LENGTH], dtype=torch.int32)
    trained = int((labels != IGNORE).sum())
    return Batch(
        ids, labels, positions[None], bounds, 28 - first, trained, 28, (number,), real=real, vision=vision,
        modality=modality[None],
    )  # fmt: skip


def start(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    value = whole_value(name, shape)
    return value + 1 if name.endswith("ln.weight") else 0.1 * value if name.endswith("correction.bias") else value


def train(
    axes: dict[str, Any], options: dict[str, Any], lora: bool, frozen: bool, losses: bool
) -> tuple[list[float], list[float], dict[str, Any], torch.Tensor]:
    compiled.BACKEND = "aot_eager"  # what the compiler sees, without its code for a CPU
    layout = Layout(**axes)
    rank = torch.distributed.get_rank() if layout.size > 1 else 0
    world = World(layout, rank)
    with torch.device("meta"):
        model: Any = SPEC.build(SHAPE)
        if lora:
            inject(model, LoRASettings.resolve(rank=3), seed=0)
    if frozen:
        model.tower.requires_grad_(False)
    sharding = sharding_of(model, SPEC.plan, layout)

    def fill(name: str, piece: torch.Tensor) -> None:
        whole = start(name, sharding.shape(name))
        for box in sharding.boxes(name, rank):
            piece[box.local_slices] = whole[box.global_slices]

    engine = parallelise(
        model, sharding, world, pick("cpu"), torch.float32, causal_loss, fill, one_document, SpreadOptions(**options)
    )
    if losses:
        install_losses(engine, world)
    params = [(plain(n), p) for part in engine.parts for n, p in part.named_parameters() if p.requires_grad]
    optimizer = AdamW(make_groups(params, 3, 0.1), (0.9, 0.95), 1e-6)
    step = TrainStep(engine, optimizer, Schedule("constant", 1e-3, 99))
    results = []
    for k in range(1, STEPS + 1):
        rows = [row(k, number, number % 2 == 0) for number in range(ROWS)]
        results.append(step(rows[layout.data_rank(rank) :: layout.data_ranks], k))
    probe = row(99, 0, True)
    logits = torch.cat((engine.answer(probe)[0, :28], engine.logits(torch.arange(1, 14)[None])[0]))
    pieces = {}
    for name, param in params:
        kept = dict(sharding.holders(name)).get(rank, ())
        if kept:
            pieces[name] = [(box.global_slices, local(param.detach())[box.local_slices].clone()) for box in kept]
    return [r.loss for r in results], [r.grad_norm for r in results], pieces, logits


def install_losses(engine: Any, world: World) -> None:
    from erniekit.recipes.expert_layers import _sum_over_rows, banks

    sum_over, over = _sum_over_rows(world)
    piece = (world.at["tp"], world.layout.tp) if world.layout.sequence_parallel else (0, 1)
    for part in engine.parts:
        part.records = []
    for k, (bank, modal) in enumerate(banks(engine.parts)):
        weights = RouterLossWeights(0.05 * (1 + k % 2), 0.01, 0.05 * (1 + k % 2))
        bank.balance = RouterLosses(weights, engine.router_share, sum_over, over, piece, modal=modal)


_alone: dict[str, Any] = {}


def check(
    ranks: Ranks, axes: dict[str, Any], lora: bool = False, frozen: bool = False, losses: bool = False, **options: Any
) -> None:
    case = (lora, frozen, losses)
    if str(case) not in _alone:
        _alone[str(case)] = train({}, {}, *case)
    want_losses, norms, pieces, logits = _alone[str(case)]
    want = {name: boxes[0][1] for name, boxes in pieces.items()}
    answers = ranks.run(Layout(**axes).size, _train, axes, options, case)
    for got_losses, got_norms, _, got_logits in answers:
        assert got_losses == pytest.approx(want_losses, abs=2e-6)
        assert got_norms == pytest.approx(norms, rel=2e-5)
        torch.testing.assert_close(got_logits, logits, atol=5e-5, rtol=0)
    still = [n for n, value in want.items() if torch.allclose(value, start(n, value.shape) * DECAYED, atol=1e-5)]
    assert not still, "it must really have trained"
    got = assembled(answers, {name: tuple(value.shape) for name, value in want.items()})
    for name, value in want.items():
        # A step moves a weight by 1e-3; where gradients are tiny rounding is a larger share of it.
        torch.testing.assert_close(got[name], value, atol=5e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def _train(axes: dict[str, Any], options: dict[str, Any], case: tuple[bool, bool, bool]) -> Any:
    return train(axes, options, *case)


GATHER = dict(dispatch="all_gather")
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "data 2": (dict(dp=2), {}),
    "tp2 inside experts": (dict(tp=2), {}),
    "tp2": (dict(tp=2, experts="tp"), {}),
    "tp2 with sequence parallel": (dict(tp=2, experts="tp", sequence_parallel=True), {}),
    "sharding 2": (dict(fsdp=2, sharding_stage=3), {}),
    "sharding 2, experts over data": (dict(fsdp=2, experts="data", sharding_stage=2), {}),
    "data 2, all to all": (dict(dp=2, experts="data"), {}),
    "data 2, all gather": (dict(dp=2, experts="data"), GATHER),
    "pp2": (dict(pp=2), {}),
    "cp2": (dict(cp=2), {}),
    "cp2, experts over data": (dict(cp=2, experts="data"), {}),
    "tp2 x dp2": (dict(tp=2, dp=2, experts="data", sequence_parallel=True), {}),
    "tp2 x sharding 2, experts over all": (dict(tp=2, fsdp=2, experts="world", sequence_parallel=True), {}),
    "pp2 x sharding 2": (dict(pp=2, fsdp=2, experts="data"), {}),
    "pp2 x tp2": (dict(pp=2, tp=2, experts="tp", sequence_parallel=True), {}),
    "cp2 x sharding 2": (dict(cp=2, fsdp=2), {}),
    "cp2 x tp2": (dict(cp=2, tp=2, experts="tp", sequence_parallel=True), {}),
    "sharding 2, compiled": (dict(fsdp=2), dict(compile=True)),
    "pp2, computed again": (dict(pp=2), dict(recompute="full")),
    "sharding 2, computed again": (dict(fsdp=2, experts="data"), dict(recompute="full")),
}  # fmt: skip
OFTEN = ("tp2 with sequence parallel", "sharding 2", "data 2, all to all", "cp2", "pp2")


@pytest.mark.parametrize("name", named(*OFTEN, full=LAYOUTS))
def test_a_model_that_sees_trains_the_same_in_layout(name: str, ranks: Ranks) -> None:
    axes, options = LAYOUTS[name]
    check(ranks, axes, **options)


MORE = ("sharding 2", "tp2 with sequence parallel", "cp2, experts over data", "pp2 x tp2", "data 2")


@pytest.mark.parametrize("name", named(full=MORE))
def test_router_losses_of_both_modalities_are_the_same_in_layout(name: str, ranks: Ranks) -> None:
    axes, options = LAYOUTS[name]
    check(ranks, axes, losses=True, **options)


@pytest.mark.parametrize("name", named(full=("sharding 2, experts over data", *MORE)))
def test_adapters_over_a_frozen_tower_train_the_same_in_layout(name: str, ranks: Ranks) -> None:
    axes, options = LAYOUTS[name]
    check(ranks, axes, lora=True, **options)


@pytest.mark.parametrize("name", named(full=("sharding 2", "data 2", "pp2")))
def test_a_frozen_tower_in_front_of_a_trained_model_in_layout(name: str, ranks: Ranks) -> None:
    axes, options = LAYOUTS[name]
    check(ranks, axes, frozen=True, **options)
