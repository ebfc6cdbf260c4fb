"""The layout that is planned to be the fastest is one of the two that are: eight layouts of two CPU ranks over gloo.
Products, passes over memory and collectives are measured on the same ranks at the same time."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from erniekit.bench.data import make_steps
from erniekit.bench.workloads import Rows
from erniekit.data.collate import one_document
from erniekit.devices import pick
from erniekit.losses.causal import causal_loss
from erniekit.models import MODELS
from erniekit.models.config import DecoderConfig
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.schedule import Schedule
from erniekit.parallel import comm
from erniekit.parallel.apply import SpreadOptions, parallelise
from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from erniekit.parallel.sharding_table import plain, sharding_of
from erniekit.planner.cards import CARDS, CardRates, rates_of
from erniekit.planner.device_pool import DevicePool
from erniekit.planner.evaluate import Candidate, evaluate
from erniekit.planner.job import Job
from erniekit.planner.static_bytes import StorageKinds, TensorBlocks
from erniekit.train.step import TrainStep
from support.ranks import Ranks

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("ranks")]

SHAPE = DecoderConfig(
    family="ernie4_5", vocab_size=512, hidden_size=256, intermediate_size=768, num_layers=4, num_heads=8,
    num_kv_heads=4, head_dim=32, rms_norm_eps=1e-5, rope_theta=1e4, rope_style="pairs", max_positions=512,
    tie_word_embeddings=False,
)  # fmt: skip
LENGTH, PACKS, STEPS = 256, 4, 6
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": dict(dp=2),
    "stage 1": dict(fsdp=2, sharding_stage=1),
    "stage 2": dict(fsdp=2, sharding_stage=2),
    "stage 3": dict(fsdp=2, sharding_stage=3),
    "tp": dict(tp=2),
    "tp, sequences cut": dict(tp=2, sequence_parallel=True),
    "pp": dict(pp=2),
    "cp": dict(cp=2),
}


def best_step(axes: dict[str, Any]) -> float:
    """Seconds of the fastest of a few steps: others may have had the core in the slower ones."""
    layout, device, spec = Layout(**axes), pick("cpu"), MODELS.get(SHAPE.family)
    rank = torch.distributed.get_rank()
    world = World(layout, rank)
    with torch.device("meta"):
        model = spec.build(SHAPE)
    sharding = sharding_of(model, spec.plan, layout)

    def fill(name: str, piece: torch.Tensor) -> None:
        piece.normal_(0, 0.02, generator=torch.Generator().manual_seed(len(name)))

    options = SpreadOptions()
    engine = parallelise(model, sharding, world, device, torch.float32, causal_loss, fill, one_document, options)
    named = [(plain(n), p) for part in engine.parts for n, p in part.named_parameters()]
    optimizer = AdamW(make_groups(named, SHAPE.num_layers, 0.1), (0.9, 0.95), 1e-6)
    step = TrainStep(engine, optimizer, Schedule("constant", 1e-4, 99))
    packs = [data.batch for data in make_steps(Rows(1, LENGTH), SHAPE.vocab_size, PACKS, 0)]
    mine = packs[layout.data_rank(rank) :: layout.data_ranks]
    seconds = []
    for number in range(1, STEPS + 1):
        world.gather(None)  # all begin together
        began = time.perf_counter()
        step(mine, number)
        world.gather(None)  # and the last of them counts
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def fastest(act: Any, times: int = 8) -> float:
    act()
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def measured_rates() -> dict[str, float]:
    """Of this rank while the other measures as well."""
    x, w = torch.randn(LENGTH, 256), torch.randn(256, 768)
    large, small = torch.ones(4_000_000), torch.ones(1)
    group = World(Layout(dp=2), torch.distributed.get_rank()).mesh["dp"].get_group()
    product = 2.0 * LENGTH * 256 * 768 / fastest(lambda: torch.mm(x, w), 50)
    copied = 8.0 * large.numel() / fastest(lambda: large.mul_(1.0))
    latency = fastest(lambda: comm.all_reduce(small, group=group))
    link = 4.0 * large.numel() / fastest(lambda: comm.all_reduce(large, group=group))
    return {"dense": product, "elementwise": copied, "update": copied, "link": link, "latency": latency}


def job() -> Job:
    spec = MODELS.get(SHAPE.family)
    with torch.device("meta"):
        model = spec.build(SHAPE)
    sharding = sharding_of(model, spec.plan, Layout())
    storing = StorageKinds(frozenset(sharding.names()), compute=4, fused=False)
    blocks = TensorBlocks(sharding, (False,) * SHAPE.num_layers, storing)
    return Job(SHAPE, blocks, rows=1, length=LENGTH, packs=PACKS, compute=4, recomputed=0)


def test_the_best_predicted_layout_is_among_the_two_fastest_of_eight(ranks: Ranks) -> None:
    answers = ranks.run(2, measured_rates)
    slower = {name: min(one[name] for one in answers) for name in answers[0]}
    slower["latency"] = max(one["latency"] for one in answers)
    usual = rates_of(CARDS["cpu"])
    attention = ((LENGTH, slower["dense"] / 2),)
    rates: CardRates = replace(usual, **slower, attention=attention, layer_launch=1e-4, network=slower["link"])
    place = DevicePool(CARDS["cpu"], rates, 2, limit=float("inf"))
    one = job()
    planned: dict[str, Candidate] = {n: evaluate(one, Layout(**a), place, exact=True) for n, a in LAYOUTS.items()}
    measured = {name: max(ranks.run(2, best_step, axes)) for name, axes in LAYOUTS.items()}
    for name in sorted(measured, key=measured.__getitem__):
        print(f"{name:<18} {1000 * measured[name]:7.1f} ms, planned {1000 * planned[name].seconds:7.1f}")
    best = min(planned, key=lambda name: planned[name].seconds)
    assert best in sorted(measured, key=measured.__getitem__)[:2]
