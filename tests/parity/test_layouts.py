"""The heart of the suite: ranks of a layout change where numbers live, never what they are.

Ten steps of real training in every layout on gloo ranks, against the same ten steps in one process.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from erniekit.data.collate import collate, one_document
from erniekit.data.types import IGNORE, Batch, Pack, Sample
from erniekit.devices import pick
from erniekit.errors import PlanError
from erniekit.lora.inject import inject
from erniekit.lora.settings import LoRASettings
from erniekit.losses.causal import causal_loss
from erniekit.models import MODELS
from erniekit.models.config import DecoderConfig
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
from support.layouts import LAYOUTS
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

LENGTH, STEPS, GLOBAL = 32, 10, 4  # tokens a row, updates, packs a step
SHAPE = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8)
ODD_HEADS = dict(SHAPE, num_heads=5, num_kv_heads=1, intermediate_size=44, vocab_size=67)
THREE_HEADS = dict(ODD_HEADS, num_heads=3)  # over four ranks: one has none
TWENTY_FOUR = dict(SHAPE, num_heads=20, num_kv_heads=4, num_layers=2)


def config(family: str, shape: dict[str, int]) -> DecoderConfig:
    style = {"ernie4_5": "pairs", "llama": "halves"}[family]
    return DecoderConfig(
        family=family, rms_norm_eps=1e-5, rope_theta=1e4, rope_style=style, max_positions=128,
        tie_word_embeddings=family == "ernie4_5", **shape,
    )  # fmt: skip


def whole_value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor's start, from its name alone: the same whatever the layout. Adapters' B starts off zero on purpose."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    values = torch.empty(shape).normal_(0, 0.15, generator=torch.Generator().manual_seed(seed))
    return values + 1.0 if "norm" in name else values


def packs(step: int) -> list[Pack]:
    rng = np.random.default_rng(step)
    out = []
    for number in range(GLOBAL):
        samples, left = [], LENGTH
        while left >= 4:
            n = min(left, int(rng.integers(1, 20)))
            ids, labels = rng.integers(1, 61, n).astype(np.int32), rng.integers(1, 61, n).astype(np.int32)
            labels[: int(rng.integers(0, n + 1))] = IGNORE
            samples.append(Sample(ids, labels))
            left -= n
        out.append(Pack(tuple(samples), number))
    return out


def labels_in_one_place(step: int) -> list[Pack]:
    """All labels of a step in one eighth of one row: on one of the ranks that share a sequence, on one of those that
    read different rows, and in one micro-batch."""
    rng = np.random.default_rng(step)
    ids = rng.integers(1, 61, (GLOBAL, LENGTH)).astype(np.int32)
    labels = np.full_like(ids, IGNORE)
    labels[0, LENGTH // 4 : 3 * LENGTH // 8] = ids[0, 1 : 1 + LENGTH // 8]
    return [Pack((Sample(*row),), number) for number, row in enumerate(zip(ids, labels))]


def micro_batches(step: int, layout: Layout, rank: int, one_place: bool) -> list[Batch]:
    rows = labels_in_one_place(step) if one_place else packs(step)
    return [collate([pack], pad_to=LENGTH) for pack in rows[layout.data_rank(rank) :: layout.data_ranks]]


def train(
    axes: dict[str, Any],
    family: str,
    shape: dict[str, int],
    lora: bool,
    options: dict[str, Any],
    one_place: bool = False,
) -> tuple[list[float], list[float], dict[str, torch.Tensor], torch.Tensor]:
    """Losses, norms, this rank's owned pieces of the final weights put into whole tensors, and probe logits."""
    compiled.BACKEND = "aot_eager"  # what the compiler sees, without its code for a CPU
    layout = Layout(**axes)
    rank = torch.distributed.get_rank() if layout.size > 1 else 0
    world, spec, device = World(layout, rank), MODELS.get(family), pick("cpu")
    with torch.device("meta"):
        model = spec.build(config(family, shape))
        if lora:
            inject(model, LoRASettings.resolve(rank=3), seed=0)
    sharding = sharding_of(model, spec.plan, layout)

    def fill(name: str, piece: torch.Tensor) -> None:
        whole = whole_value(name, sharding.shape(name))
        for box in sharding.boxes(name, rank):
            piece[box.local_slices] = whole[box.global_slices]

    engine = parallelise(
        model, sharding, world, device, torch.float32, causal_loss, fill, one_document, SpreadOptions(**options)
    )
    named = [(plain(n), p) for part in engine.parts for n, p in part.named_parameters() if p.requires_grad]
    optimizer = AdamW(make_groups(named, shape["num_layers"], 0.1), (0.9, 0.95), 1e-6)
    step = TrainStep(engine, optimizer, Schedule("constant", 1e-3, 99))
    results = [step(micro_batches(k, layout, rank, one_place), k) for k in range(1, STEPS + 1)]
    logits = engine.logits(torch.arange(1, 14)[None])
    pieces = {}
    for name, param in named:
        kept = dict(sharding.holders(name)).get(rank, ())
        if kept:
            pieces[name] = [(box.global_slices, local(param.detach())[box.local_slices].clone()) for box in kept]
    return [r.loss for r in results], [r.grad_norm for r in results], pieces, logits


def assembled(answers: list[Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    whole = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    for _, _, pieces, _ in answers:
        for name, boxes in pieces.items():
            for where, value in boxes:
                assert whole[name][where].isnan().all(), "no element has two owners"
                whole[name][where] = value
    return whole


_alone: dict[str, Any] = {}


def alone(family: str, shape: dict[str, int], lora: bool, one_place: bool) -> Any:
    key = f"{family}{shape}{lora}{one_place}"
    if key not in _alone:
        _alone[key] = train({}, family, shape, lora, {}, one_place)
    return _alone[key]


def check(
    ranks: Ranks,
    axes: dict[str, Any],
    family: str = "ernie4_5",
    shape: dict[str, int] = SHAPE,
    lora: bool = False,
    one_place: bool = False,
    **options: Any,
) -> None:
    losses, norms, pieces, logits = alone(family, shape, lora, one_place)
    want = {name: boxes[0][1] for name, boxes in pieces.items()}
    answers = ranks.run(Layout(**axes).size, train, axes, family, shape, lora, options, one_place)
    for got_losses, got_norms, _, got_logits in answers:
        # Four labels of 4.5 each: what rounding does to one is not averaged over many.
        assert got_losses == pytest.approx(losses, abs=5e-6 if one_place else 1e-6)
        assert got_norms == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(got_logits, logits, atol=2e-5, rtol=0)
    got = assembled(answers, {name: tuple(value.shape) for name, value in want.items()})
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    moved = [n for n, value in want.items() if not torch.allclose(value, whole_value(n, tuple(value.shape)), atol=1e-4)]
    assert moved == list(want), "it must really have trained"


# More of the same kind as others in the list: run by `make test-full`.
HEAVY = (
    "dp4", "tp2", "tp4", "pp4", "cp4", "sharding stage 1", "sharding stage 2", "pp2 cut by hand", "sharding 2 x dp 2",
    "sharding 2 x cp2", "pp2 x sharding 2", "tp2 x pp2 x dp2", "tp2 x cp2", "pp2 x dp2",
    "tp2 x sharding 2",
)  # fmt: skip


def named(*names: str) -> list[Any]:
    return [pytest.param(n, marks=pytest.mark.full) if n in HEAVY else n for n in names]


@pytest.mark.parametrize("name", named(*LAYOUTS))
def test_full_training_is_the_same_in_layout(name: str, ranks: Ranks) -> None:
    check(ranks, LAYOUTS[name])


@pytest.mark.parametrize(
    "name", ["pp2", *(pytest.param(n, marks=pytest.mark.full) for n in ("tp2", "sharding stage 3"))]
)
def test_llama_with_an_untied_head_is_the_same_in_layout(name: str, ranks: Ranks) -> None:
    check(ranks, LAYOUTS[name], family="llama")


PARTLY = ("cp2", "sharding stage 3", "dp2")
PARTLY_TOO = (
    "cp4", "pp2", "pp2 interleaved", "sharding stage 1", "sharding 2 x cp2", "tp2 x cp2", "pp2 x sharding 2",
    "tp2 x sharding 2", "pp2 x dp2",
)  # fmt: skip


@pytest.mark.parametrize("name", [*PARTLY, *(pytest.param(n, marks=pytest.mark.full) for n in PARTLY_TOO)])
def test_an_untied_head_is_trained_the_same_where_only_some_ranks_have_labels(name: str, ranks: Ranks) -> None:
    check(ranks, LAYOUTS[name], family="llama", one_place=True)


@pytest.mark.parametrize(
    ("name", "family"),
    [("pp2", "ernie4_5"), *(pytest.param(n, "llama", marks=pytest.mark.full) for n in ("cp2", "tp2 x cp2", "pp2"))],
)
def test_so_is_a_bias_of_the_head(name: str, family: str, ranks: Ranks) -> None:
    check(ranks, LAYOUTS[name], family=family, shape=dict(SHAPE, head_bias=True), one_place=True)


@pytest.mark.full
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", ["cp2", "pp2", "sharding 2 x cp2"])
def test_a_tied_head_and_adapters_are_too(name: str, lora: bool, ranks: Ranks) -> None:
    check(ranks, LAYOUTS[name], lora=lora, one_place=True)


LORA = ("tp2 with sequence parallel", "pp2", "sharding stage 3")
LORA_TOO = ("cp2", "dp2", "tp2", "sharding stage 1", "tp2 x pp2", "pp2 x dp2")


@pytest.mark.parametrize("name", [*LORA, *(pytest.param(n, marks=pytest.mark.full) for n in LORA_TOO)])
def test_lora_is_the_same_in_layout(name: str, ranks: Ranks) -> None:
    check(ranks, LAYOUTS[name], lora=True)


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        (dict(tp=3), ODD_HEADS),
        pytest.param(dict(tp=4), THREE_HEADS, marks=pytest.mark.full),
        pytest.param(dict(tp=8), TWENTY_FOUR, marks=pytest.mark.full),
        pytest.param(dict(tp=4, fsdp=2), ODD_HEADS, marks=pytest.mark.full),
        pytest.param(dict(tp=8), ODD_HEADS, marks=pytest.mark.full),
    ],
)
def test_heads_need_not_divide(axes: dict[str, Any], shape: dict[str, int], ranks: Ranks) -> None:
    check(ranks, axes, shape=shape)


@pytest.mark.full
def test_lora_on_heads_that_do_not_divide(ranks: Ranks) -> None:
    check(ranks, dict(tp=4), shape=ODD_HEADS, lora=True)


@pytest.mark.parametrize(
    "granularity", ["full", *(pytest.param(g, marks=pytest.mark.full) for g in ("full_attn", "core_attn"))]
)
def test_recompute_in_a_layout_changes_nothing(granularity: str, ranks: Ranks) -> None:
    check(ranks, dict(tp=2, pp=2), recompute=granularity)


@pytest.mark.parametrize(
    ("axes", "lora"),
    [
        (dict(pp=2), False),
        pytest.param(dict(pp=2, tp=2), False, marks=pytest.mark.full),
        pytest.param(dict(pp=2), True, marks=pytest.mark.full),
    ],
)
def test_the_zero_bubble_schedule_changes_nothing(axes: dict[str, Any], lora: bool, ranks: Ranks) -> None:
    check(ranks, dict(axes, virtual_stages=2), lora=lora, schedule="zero_bubble")


COMPILED = ("tp2 with sequence parallel", "sharding stage 3")
COMPILED_TOO = ("dp2", "tp2", "pp2", "cp2", "tp2 x pp2", "pp2 x sharding 2", "tp2 x sharding 2", "pp2 interleaved")


@pytest.mark.parametrize("name", [*COMPILED, *(pytest.param(n, marks=pytest.mark.full) for n in COMPILED_TOO)])
@pytest.mark.full
def test_compiled_layers_train_the_same_in_layout(name: str, ranks: Ranks) -> None:
    check(ranks, LAYOUTS[name], one_place=True, compile=True)  # rows of one document: the CPU has no kernel for packs


def refusal(axes: dict[str, Any]) -> str:
    try:
        train(axes, "ernie4_5", SHAPE, False, dict(schedule="zero_bubble"))
    except PlanError as error:
        return str(error)
    return ""


def test_the_zero_bubble_schedule_refuses_sharded_weights_before_the_first_step(ranks: Ranks) -> None:
    for said in ranks.run(4, refusal, dict(pp=2, virtual_stages=2, fsdp=2)):
        assert "zero_bubble schedule does not work with sharded weights" in said


class Reductions(TorchDispatchMode):
    """Counts how often gradients are reduced into this rank's shards, whatever torch calls that in Python."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in op.name()
        return op(*args, **(kwargs or {}))


def reductions(axes: dict[str, Any]) -> int:
    with Reductions() as seen:
        train(axes, "ernie4_5", SHAPE, False, {})
    return seen.count


@pytest.mark.full
def test_stage_1_reduces_gradients_once_a_step_under_a_pipeline_too(ranks: Ranks) -> None:
    """Two micro-batches a rank: stage 2 reduces after each."""
    once = ranks.run(4, reductions, dict(pp=2, fsdp=2, sharding_stage=1))
    every = ranks.run(4, reductions, dict(pp=2, fsdp=2, sharding_stage=2))
    assert min(once) >= STEPS
    assert every == [2 * count for count in once]
