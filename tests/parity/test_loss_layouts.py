"""KTO, distillation, reward models and classification are the same in every layout that they run in.

Each stage's own loss, and what it prepares before a step, on tiny models over gloo.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from erniekit.config import load
from erniekit.data.collate import collate, one_document
from erniekit.data.preference import PairSample
from erniekit.data.preference_collate import collate_pairs
from erniekit.data.types import IGNORE, Batch, Pack, Sample
from erniekit.data.unpaired import UnpairedSample
from erniekit.data.unpaired_collate import collate_unpaired
from erniekit.devices import pick
from erniekit.lora.adapters_off import adapters_off
from erniekit.lora.inject import inject
from erniekit.lora.settings import LoRASettings
from erniekit.losses.causal import causal_loss
from erniekit.losses.distillation import DistillingHead, KeptHidden
from erniekit.models import MODELS
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
from erniekit.recipes import STAGES
from erniekit.recipes.distillation import mix_of
from erniekit.recipes.dpo import sum_over_cp
from erniekit.recipes.generation_eval import plain_copy
from erniekit.recipes.kto import Baseline
from erniekit.recipes.reference import Reference
from erniekit.serve.batch_generation import generate_greedily
from erniekit.train.step import TrainStep
from parity.test_layouts import SHAPE, config, whole_value
from support import layouts
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

LENGTH, STEPS, GLOBAL = 48, 4, 4  # tokens a row, updates, packs a step
WORDS = {
    "KTO": ("beta=0.5", "undesirable_weight=0.7"),
    "SFT": ("teacher_model_name_or_path=not-read", "distill_kl=reverse", "distill_temperature=2"),
    "RM": ("reward_margin=0.5", "center_rewards_coefficient=0.1"),
    "CLS": (),
}


LABELS = {"RM": ("LABEL_0",), "CLS": ("a", "b", "c")}


def spread(axes: dict[str, Any], stage: str, lora: bool) -> tuple[Engine, Any, Any]:
    layout = Layout(**axes)
    rank = torch.distributed.get_rank() if layout.size > 1 else 0
    world, spec, device = World(layout, rank), MODELS.get("ernie4_5"), pick("cpu")
    with torch.device("meta"):
        model = spec.build(replace(config("ernie4_5", SHAPE), labels=LABELS.get(stage, ())))
        if lora:
            inject(model, LoRASettings.resolve(rank=3), seed=0)
    sharding = sharding_of(model, spec.plan, layout)

    def fill(name: str, piece: torch.Tensor) -> None:
        whole = whole_value(name, sharding.shape(name))
        for box in sharding.boxes(name, rank):
            piece[box.local_slices] = whole[box.global_slices]

    cfg = load([f"stage={stage}", *WORDS[stage]])
    names = STAGES.get(stage).metric_names(cfg)
    step_metrics = StepMetrics(names, device.handle) if names else None
    loss = STAGES.get(stage).loss(cfg, world, step_metrics)
    engine = parallelise(model, sharding, world, device, torch.float32, loss, fill, one_document, SpreadOptions())
    engine.step_metrics = step_metrics
    return engine, sharding, cfg


def judged_packs(step: int) -> list[Pack]:
    """The last pack of the third step has nothing to learn, as what fills up an epoch's last step."""
    rng = np.random.default_rng(step)
    out = []
    for number in range(GLOBAL):
        samples = []
        for _ in range(3):
            prompt, answers = int(rng.integers(1, 6)), rng.integers(1, 9, 2)
            ids = [rng.integers(1, 61, prompt + n).astype(np.int32) for n in answers]
            made = []
            for one in ids:
                labels = np.roll(one, -1)
                labels[: prompt - 1] = labels[-1] = IGNORE
                made.append(UnpairedSample(one, labels, prompt, bool(rng.integers(2))))
            own, other = made
            if step == 3 and number == GLOBAL - 1:
                own = UnpairedSample(own.ids, np.full_like(own.labels, IGNORE), prompt, True)
            other = other.behind(own, LENGTH)
            samples.append(UnpairedSample(own.ids, own.labels, prompt, own.desirable, other))
        out.append(Pack(tuple(samples), number))
    return out


def train_kto(axes: dict[str, Any], lora: bool) -> dict[str, Any]:
    engine, sharding, _ = spread(axes, "KTO", lora)
    summed = sum_over_cp(engine.world)
    if lora:
        reference = Reference(engine, summed, 16, partial(adapters_off, engine.parts))
    else:
        reference = Reference(spread(axes, "KTO", lora)[0], summed, 16)
    prepare = Baseline(reference, Reference(engine, summed, 16))
    return steps(engine, sharding, prepare, judged_packs, partial(collate_unpaired, pad_to=LENGTH))


def steps(engine: Engine, sharding: Any, prepare: Any, packs: Any, put: Any) -> dict[str, Any]:
    world = engine.world
    named = [(plain(n), p) for part in engine.parts for n, p in part.named_parameters() if p.requires_grad]
    optimizer = AdamW(make_groups(named, SHAPE["num_layers"], 0.1), (0.9, 0.95), 1e-6)
    step = TrainStep(engine, optimizer, Schedule("constant", 1e-3, 99), prepare=prepare)
    results = []
    for k in range(1, STEPS + 1):
        mine = packs(k)[world.layout.data_rank(world.rank) :: world.layout.data_ranks]
        batches: list[Batch] = [put([pack]) for pack in mine]
        results.append(step(batches, k))
    pieces = {
        name: [(box.global_slices, local(param.detach())[box.local_slices].clone()) for box in boxes]
        for name, param in named
        if (boxes := dict(sharding.holders(name)).get(world.rank, ()))
    }
    told = ("losses", "norms", "extras")
    values = ([r.loss for r in results], [r.grad_norm for r in results], [r.extras for r in results])
    return {**dict(zip(told, values)), "pieces": pieces}


_alone: dict[Any, dict[str, Any]] = {}


def check(ranks: Ranks, axes: dict[str, Any], train: Any, *args: Any) -> dict[str, Any]:
    key = (train.__name__, *args)
    if key not in _alone:
        _alone[key] = train({}, *args)
    one = _alone[key]
    answers = ranks.run(Layout(**axes).size, train, axes, *args)
    for answer in answers:
        assert answer["losses"] == pytest.approx(one["losses"], abs=2e-6)  # fp32, added up in another order
        assert answer["norms"] == pytest.approx(one["norms"], rel=1e-5)
        for told, expected in zip(answer["extras"], one["extras"]):
            assert told == pytest.approx(expected, abs=1e-4)
    for name, ((_, value),) in one["pieces"].items():
        whole = torch.full_like(value, float("nan"))
        for where, piece in (part for answer in answers for part in answer["pieces"].get(name, ())):
            whole[where] = piece
        torch.testing.assert_close(whole, value, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    return one


def named(*names: str, per_commit: tuple[str, ...]) -> list[Any]:
    return [n if n in per_commit else pytest.param(n, marks=pytest.mark.full) for n in names]


KTO_LAYOUTS = ("dp2", "tp2", "tp2 with sequence parallel", "pp2", "cp2", "sharding stage 3", "sharding 2 x cp2")


@pytest.mark.parametrize("name", named(*KTO_LAYOUTS, per_commit=("sharding stage 3",)))
def test_kto_is_the_same_in_layout(name: str, ranks: Ranks) -> None:
    one = check(ranks, layouts.LAYOUTS[name], train_kto, False)
    assert max(told["kl"] for told in one["extras"]) > 0  # or the baseline would be no part of it


@pytest.mark.parametrize("name", named("dp2", "sharding stage 3", "cp2", per_commit=()))
def test_kto_with_adapters_and_the_model_without_them_as_reference(name: str, ranks: Ranks) -> None:
    check(ranks, layouts.LAYOUTS[name], train_kto, True)


def answers(step: int) -> list[Pack]:
    """The last pack of the third step has nothing to learn."""
    rng = np.random.default_rng(step)
    out = []
    for number in range(GLOBAL):
        ids, labels = (rng.integers(1, 61, (2, 15)).astype(np.int32) for _ in range(2))
        labels[:, :4] = IGNORE
        if step == 3 and number == GLOBAL - 1:
            labels[:] = IGNORE
        out.append(Pack(tuple(Sample(i, y) for i, y in zip(ids, labels)), number))
    return out


def train_distilled(axes: dict[str, Any], lora: bool) -> dict[str, Any]:
    engine, sharding, cfg = spread(axes, "SFT", lora)
    teacher = spread({}, "SFT", False)[0].model
    with torch.no_grad():
        for param in teacher.parameters():
            param.mul_(1.2 if param.dim() > 1 else 1.0)
    teacher.output = KeptHidden()
    engine.model.output = engine.loss.head = DistillingHead(engine.model.output, mix_of(cfg))
    engine.loss.teacher = teacher.eval()
    engine.train()
    return steps(engine, sharding, None, answers, partial(collate, pad_to=LENGTH))


@pytest.mark.parametrize("name", named("dp2", "sharding stage 3", "sharding stage 1", per_commit=("sharding stage 3",)))
@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.full)], ids=["all weights", "LoRA"])
def test_distillation_is_the_same_in_layout(name: str, lora: bool, ranks: Ranks) -> None:
    one = check(ranks, layouts.LAYOUTS[name], train_distilled, lora)
    assert all(told["kl_loss"] > 0 for told in one["extras"])


def ended(step: int, pairs: bool) -> list[Pack]:
    """Texts, or pairs of answers, with a label at each end; the last pack of the third step has none."""
    rng = np.random.default_rng(step)
    out = []
    for number in range(GLOBAL):
        samples: list[Sample] = []
        for _ in range(2):
            ids, labels = rng.integers(1, 61, 18).astype(np.int32), np.full(18, IGNORE, np.int32)
            if step != 3 or number < GLOBAL - 1:
                labels[[10, 17]] = 0
                labels[17] = 0 if pairs else rng.integers(3)
                labels[10] = 0 if pairs else IGNORE
            samples.append(PairSample(ids, labels, 5, 11, 11, 2.0) if pairs else Sample(ids, labels))
        out.append(Pack(tuple(samples), number))
    return out


def train_scores(axes: dict[str, Any], stage: str, lora: bool = False) -> dict[str, Any]:
    engine, sharding, _ = spread(axes, stage, lora)
    put = partial(collate_pairs if stage == "RM" else collate, pad_to=LENGTH)
    return steps(engine, sharding, None, partial(ended, pairs=stage == "RM"), put)


@pytest.mark.parametrize(
    "name", named("dp2", "sharding stage 3", "sharding 2 x dp 2", per_commit=("sharding stage 3",))
)
@pytest.mark.parametrize("stage", ["RM", pytest.param("CLS", marks=pytest.mark.full)])
def test_score_heads_are_trained_the_same_in_layout(stage: str, name: str, ranks: Ranks) -> None:
    check(ranks, layouts.LAYOUTS[name], train_scores, stage)


@pytest.mark.parametrize("name", named("dp2", "sharding stage 3", per_commit=()))
def test_a_score_head_beside_adapters_is_trained_the_same_in_layout(name: str, ranks: Ranks) -> None:
    one = check(ranks, layouts.LAYOUTS[name], train_scores, "CLS", True)
    assert "score.weight" in one["pieces"]


def generate(axes: dict[str, Any], lora: bool) -> list[list[int]]:
    """Greedy answers of the trained model's twin, each rank its share."""
    engine, sharding, _ = spread(axes, "SFT", lora)
    engine.loss = lambda model, batch, hidden=None, scale=None: causal_loss(model, batch, hidden, 16, scale)
    steps(engine, sharding, None, answers, partial(collate, pad_to=LENGTH))
    shape = config("ernie4_5", SHAPE)
    spec = MODELS.get("ernie4_5")

    def meta() -> torch.nn.Module:
        with torch.device("meta"):
            return spec.build(shape)

    def parameters() -> Any:
        return ((plain(n), p) for part in engine.parts for n, p in part.named_parameters())

    settings = LoRASettings.resolve(rank=3) if lora else None
    seeded = SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(seed=0)))
    built: Any = SimpleNamespace(
        folder=SimpleNamespace(meta=meta, spec=spec), dtype=torch.float32, lora=settings, plan=seeded, engine=engine,
        device=pick("cpu"), parameters=parameters,
    )  # fmt: skip
    before = {name: local(p.detach()).clone() for name, p in parameters()}
    twin = plain_copy(built)
    prompts = [(3, 5, 7), (11, 2), (9, 9, 9, 9), (30,)]
    options: dict[str, Any] = dict(stop_ids=frozenset(), vocab=61, max_tokens=6)
    made = generate_greedily(twin, shape, prompts, device=pick("cpu"), dtype=torch.float32, **options)
    assert all(torch.equal(local(p.detach()), before[name]) for name, p in parameters())
    assert all(p.requires_grad == (not lora or ".lora." in name) for name, p in parameters())
    return made


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.full), True], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("name", named("dp2", "sharding stage 3", per_commit=("sharding stage 3",)))
def test_answers_generated_beside_the_training_are_the_same_in_layout(name: str, lora: bool, ranks: Ranks) -> None:
    one = generate({}, lora)
    assert len({tuple(answer) for answer in one}) > 1
    for answer in ranks.run(2, generate, layouts.LAYOUTS[name], lora):
        assert answer == one
