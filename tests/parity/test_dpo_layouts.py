"""Preference training is the same in every layout: loss, rewards and weights are those of one process.

The stage's own loss and its own references: a second model spread as the first, or the model without its adapters.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from erniekit.config import load
from erniekit.data.collate import one_document
from erniekit.data.preference import PairSample
from erniekit.data.preference_collate import collate_pairs
from erniekit.data.types import IGNORE, Batch, Pack
from erniekit.devices import pick
from erniekit.lora.adapters_off import adapters_off
from erniekit.lora.inject import inject
from erniekit.lora.settings import LoRASettings
from erniekit.models import MODELS
from erniekit.models.config import DecoderConfig, MoEShape
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.schedule import Schedule
from erniekit.parallel.apply import SpreadOptions, parallelise
from erniekit.parallel.engine import Engine
from erniekit.parallel.gradients import local
from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from erniekit.parallel.sharding_table import plain, sharding_of
from erniekit.parallel.step_metrics import StepMetrics
from erniekit.recipes.dpo import STAGE, sum_over_cp
from erniekit.recipes.reference import Reference
from erniekit.train.step import TrainStep
from parity.test_layouts import SHAPE, config, whole_value
from support import layouts
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

LENGTH, STEPS, GLOBAL = 48, 6, 4  # tokens a row, updates, packs a step
MOE = DecoderConfig(
    family="ernie4_5_moe", rms_norm_eps=1e-5, rope_theta=1e4, rope_style="pairs", max_positions=128,
    tie_word_embeddings=True, moe=MoEShape(experts=4, choices=2, width=16, shared_width=16, start=1, end=3), **SHAPE,
)  # fmt: skip
# Answers of a few tokens: a strong beta makes their preference count, and both terms of the loss are there.
SIGMOID = ("beta=0.5", "sft_loss_ratio=0.2")


def pair(rng: np.random.Generator, room: int) -> PairSample:
    shared, chosen = int(rng.integers(0, 6)), int(rng.integers(1, 9))
    rejected = min(int(rng.integers(1, 9)), room - shared - chosen)
    count = shared + chosen + rejected
    labels = rng.integers(1, 61, count).astype(np.int32)
    labels[:shared] = IGNORE
    scored = shared + chosen
    return PairSample(rng.integers(1, 61, count).astype(np.int32), labels, shared, scored, scored, 1.0)


def packs(step: int) -> list[Pack]:
    """The last pack of the third step has nothing to learn, as what fills up an epoch's last step."""
    rng = np.random.default_rng(step)
    out = []
    for number in range(GLOBAL):
        samples: list[PairSample] = []
        while (left := LENGTH - sum(len(s.ids) for s in samples)) >= 16:
            samples.append(pair(rng, left))
        if step == 3 and number == GLOBAL - 1:
            samples = [PairSample(s.ids, np.full_like(s.labels, IGNORE), *s.parts()) for s in samples[:1]]
        out.append(Pack(tuple(samples), number))
    return out


def labels_in_one_place(step: int) -> list[Pack]:
    """Both answers in the second quarter of one row: no other rank has a label."""
    rng = np.random.default_rng(step)
    ids, labels = (rng.integers(1, 61, (GLOBAL, 22)).astype(np.int32) for _ in range(2))
    labels[0, :14] = labels[1:] = IGNORE
    return [Pack((PairSample(i, y, 14, 18, 18, 1.0),), number) for number, (i, y) in enumerate(zip(ids, labels))]


def spread(axes: dict[str, Any], family: str, lora: bool, words: tuple[str, ...]) -> tuple[Engine, Any]:
    layout = Layout(**axes)
    rank = torch.distributed.get_rank() if layout.size > 1 else 0
    world, spec, device = World(layout, rank), MODELS.get(family), pick("cpu")
    with torch.device("meta"):
        model = spec.build(MOE if family == "ernie4_5_moe" else config(family, SHAPE))
        if lora:
            inject(model, LoRASettings.resolve(rank=3), seed=0)
    sharding = sharding_of(model, spec.plan, layout)

    def fill(name: str, piece: torch.Tensor) -> None:
        whole = whole_value(name, sharding.shape(name))
        for box in sharding.boxes(name, rank):
            piece[box.local_slices] = whole[box.global_slices]

    cfg = load(["stage=DPO", *words])
    step_metrics = StepMetrics(STAGE.metric_names(cfg), device.handle)
    loss = STAGE.loss(cfg, world, step_metrics)
    engine = parallelise(model, sharding, world, device, torch.float32, loss, fill, one_document, SpreadOptions())
    engine.step_metrics = step_metrics
    return engine, sharding


def train(
    axes: dict[str, Any], family: str, lora: bool, words: tuple[str, ...], one_place: bool = False
) -> dict[str, Any]:
    engine, sharding = spread(axes, family, lora, words)
    world = engine.world
    if lora:
        reference = Reference(engine, sum_over_cp(world), 16, partial(adapters_off, engine.parts))
    else:
        reference = Reference(spread(axes, family, lora, words)[0], sum_over_cp(world), 16)
    named = [(plain(n), p) for part in engine.parts for n, p in part.named_parameters() if p.requires_grad]
    optimizer = AdamW(make_groups(named, SHAPE["num_layers"], 0.1), (0.9, 0.95), 1e-6)
    step = TrainStep(engine, optimizer, Schedule("constant", 1e-3, 99), prepare=reference)
    results = []
    for k in range(1, STEPS + 1):
        rows = labels_in_one_place(k) if one_place else packs(k)
        mine = rows[world.layout.data_rank(world.rank) :: world.layout.data_ranks]
        results.append(step([collate_pairs([pack], pad_to=LENGTH) for pack in mine], k))
    pieces = {
        name: [(box.global_slices, local(param.detach())[box.local_slices].clone()) for box in boxes]
        for name, param in named
        if (boxes := dict(sharding.holders(name)).get(world.rank, ()))
    }
    return {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "extras": [r.extras for r in results],
        "pieces": pieces,
    }


_alone: dict[Any, dict[str, Any]] = {}


def alone(family: str, lora: bool, words: tuple[str, ...], one_place: bool = False) -> dict[str, Any]:
    key = family, lora, words, one_place
    if key not in _alone:
        _alone[key] = train({}, *key)
    return _alone[key]


def check(
    ranks: Ranks,
    axes: dict[str, Any],
    family: str = "ernie4_5",
    lora: bool = False,
    words: tuple[str, ...] = SIGMOID,
    one_place: bool = False,
) -> None:
    one = alone(family, lora, words, one_place)
    answers = ranks.run(Layout(**axes).size, train, axes, family, lora, words, one_place)
    for answer in answers:
        # Of a single pair rounding is not averaged over others.
        assert answer["losses"] == pytest.approx(one["losses"], abs=5e-6 if one_place else 2e-6)
        assert answer["norms"] == pytest.approx(one["norms"], rel=1e-5)
        for told, expected in zip(answer["extras"], one["extras"]):
            assert told == pytest.approx(expected, abs=1e-4)  # log-probabilities are sums of tens
    for name, ((_, value),) in one["pieces"].items():
        whole = torch.full_like(value, float("nan"))
        for where, piece in (part for answer in answers for part in answer["pieces"].get(name, ())):
            assert whole[where].isnan().all(), "no element has two owners"
            whole[where] = piece
        torch.testing.assert_close(whole, value, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


SHARED = (
    "dp2", "tp2", "tp2 with sequence parallel", "pp2", "cp2", "sharding stage 3", "tp2 x pp2", "pp2 interleaved",
    "sharding 2 x cp2", "tp2 x cp2",
)  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {name: layouts.LAYOUTS[name] for name in SHARED} | {"pp2 x cp2": dict(pp=2, cp=2)}
PER_COMMIT = ("pp2", "cp2")


def named(*names: str, per_commit: tuple[str, ...] = PER_COMMIT) -> list[Any]:
    return [n if n in per_commit else pytest.param(n, marks=pytest.mark.full) for n in names]


@pytest.mark.parametrize("name", named(*LAYOUTS))
def test_preference_training_is_the_same_in_layout(name: str, ranks: Ranks) -> None:
    check(ranks, LAYOUTS[name])


@pytest.mark.parametrize("name", named("tp2", "pp2", "cp2", "sharding stage 3", per_commit=("tp2",)))
def test_with_adapters_and_the_model_without_them_as_reference(name: str, ranks: Ranks) -> None:
    check(ranks, LAYOUTS[name], lora=True)


@pytest.mark.parametrize("name", named("dp2", "cp2", "sharding 2 x cp2", "pp2 x cp2", per_commit=("dp2",)))
def test_an_untied_head_is_trained_the_same_where_only_some_ranks_have_labels(name: str, ranks: Ranks) -> None:
    check(ranks, LAYOUTS[name], family="llama", one_place=True)


@pytest.mark.parametrize("name", named("tp2", "cp2", "sharding stage 3", per_commit=()))
def test_preference_training_of_experts_is_the_same_in_layout(name: str, ranks: Ranks) -> None:
    check(ranks, LAYOUTS[name], family="ernie4_5_moe")


@pytest.mark.parametrize("name", named("dp2", "cp2", "pp2", per_commit=("dp2",)))
def test_kto_pair_is_the_same_as_long_as_its_micro_batches_are(name: str, ranks: Ranks) -> None:
    check(ranks, LAYOUTS[name], words=("loss_type=kto_pair", "beta=0.5"))


def test_what_the_layouts_are_compared_with_really_trains() -> None:
    one = alone("ernie4_5", False, SIGMOID)
    told = one["extras"]
    assert told[0]["sigmoid_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert one["losses"][0] == pytest.approx(math.log(2) + told[0]["sft_loss"], abs=1e-6)
    assert told[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert abs(told[-1]["sigmoid_loss"] - math.log(2)) > 1e-2
    moved = [n for n, ((_, v),) in one["pieces"].items() if not torch.allclose(v, whole_value(n, tuple(v.shape)))]
    assert moved == list(one["pieces"])


def test_how_pairs_are_dealt_to_micro_batches_changes_kto_pair_alone() -> None:
    """Each of its sides is measured against the other side's mean in the micro-batch."""

    def first_loss(kind: str, together: bool) -> float:
        words = (f"loss_type={kind}", "beta=0.5")
        engine, _ = spread({}, "ernie4_5", True, words)
        reference = Reference(engine, None, 16, partial(adapters_off, engine.parts))
        rows = packs(1)
        groups: list[list[Pack]] = [rows] if together else [[row] for row in rows]
        batches: list[Batch] = [collate_pairs(group, pad_to=LENGTH) for group in groups]
        total = engine.forward_backward(reference(batches), [1.0] * len(batches))
        return float(total) / sum(batch.weight for batch in batches)

    assert first_loss("sigmoid", True) == pytest.approx(first_loss("sigmoid", False), abs=1e-6)
    assert first_loss("kto_pair", True) != pytest.approx(first_loss("kto_pair", False), abs=1e-5)
