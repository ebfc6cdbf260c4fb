"""Experts on many ranks answer and learn as they do on one.

Ten steps of real training of a tiny ERNIE MoE in every way its experts can be spread, against the same in one process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from erniekit.data.collate import collate, one_document
from erniekit.data.types import Batch
from erniekit.devices import pick
from erniekit.lora.inject import inject
from erniekit.lora.settings import LoRASettings
from erniekit.losses.causal import causal_loss
from erniekit.models import MODELS
from erniekit.models.config import DecoderConfig, MoEShape
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
from parity.test_layouts import LENGTH, assembled, labels_in_one_place, packs, whole_value
from support.layouts import EXPERT_LAYOUTS, GATHER, TO_ALL
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

STEPS = 10
ALL = ("all of the default",)  # adapters' targets
SPEC = MODELS.get("ernie4_5_moe")


def config(experts: int = 8, mtp: str = "", tied: bool = True, layers: int = 3) -> DecoderConfig:
    moe = MoEShape(experts=experts, choices=2, width=12, shared_width=24, start=1, end=layers - 1)
    return DecoderConfig(
        family="ernie4_5_moe", rms_norm_eps=1e-5, rope_theta=1e4, rope_style="pairs", max_positions=128,
        tie_word_embeddings=tied, vocab_size=61, hidden_size=32, intermediate_size=40, num_layers=layers, num_heads=4,
        num_kv_heads=2, head_dim=8, moe=moe, mtp_layers=int(bool(mtp)),
    )  # fmt: skip


def start(name: str, shape: tuple[int, ...], skewed: bool) -> torch.Tensor:
    """Skewed: every token goes to experts 0 and 1, the others get none."""
    if skewed and name.endswith("router.bias"):
        return torch.tensor([5.0, 5.0] + [0.0] * (shape[0] - 2))
    return whole_value(name, shape)


def micro_batches(
    step: int, layout: Layout, rank: int, fixed: bool, ahead: int, one_place: bool = False
) -> list[Batch]:
    rows = labels_in_one_place(step) if one_place else packs(step)
    mine = rows[layout.data_rank(rank) :: layout.data_ranks]
    return [collate([pack], pad_to=LENGTH if fixed else None, ahead=ahead) for pack in mine]


def train(
    axes: dict[str, Any],
    options: dict[str, Any],
    experts: int = 8,
    lora: tuple[str, ...] = (),
    skewed: bool = False,
    mtp: str = "",
    tied: bool = True,
    layers: int = 3,
    fixed: bool = True,
    one_place: bool = False,
) -> tuple[list[float], list[float], dict[str, Any], torch.Tensor]:
    """Losses, norms, this rank's owned pieces of the final weights, and probe logits."""
    compiled.BACKEND = "aot_eager"  # what the compiler sees, without its code for a CPU
    layout = Layout(**axes)
    rank = torch.distributed.get_rank() if layout.size > 1 else 0
    world, device = World(layout, rank), pick("cpu")
    with torch.device("meta"):
        model: Any = SPEC.build(config(experts, mtp, tied, layers))
        if lora:
            inject(model, LoRASettings.resolve(rank=3, targets=None if lora == ALL else lora), seed=0)
        if mtp == "trains":
            model.mtp_weight, model.records = 0.3, []
        elif mtp == "rests":
            model.mtp.requires_grad_(False)
    sharding = sharding_of(model, SPEC.plan, layout)

    def fill(name: str, piece: torch.Tensor) -> None:
        whole = start(name, sharding.shape(name), skewed)
        for box in sharding.boxes(name, rank):
            piece[box.local_slices] = whole[box.global_slices]

    engine = parallelise(
        model, sharding, world, device, torch.float32, causal_loss, fill, one_document, SpreadOptions(**options)
    )
    named = [(plain(n), p) for part in engine.parts for n, p in part.named_parameters() if p.requires_grad]
    optimizer = AdamW(make_groups(named, layers, 0.1), (0.9, 0.95), 1e-6)
    step = TrainStep(engine, optimizer, Schedule("constant", 1e-3, 99))
    ahead = int(mtp == "trains")
    results = [step(micro_batches(k, layout, rank, fixed, ahead, one_place), k) for k in range(1, STEPS + 1)]
    logits = engine.logits(torch.arange(1, 14)[None])
    pieces = {}
    for name, param in named:
        kept = dict(sharding.holders(name)).get(rank, ())
        if kept:
            pieces[name] = [(box.global_slices, local(param.detach())[box.local_slices].clone()) for box in kept]
    return [r.loss for r in results], [r.grad_norm for r in results], pieces, logits


_alone: dict[str, Any] = {}


def alone(**case: Any) -> Any:
    key = str(sorted(case.items()))
    if key not in _alone:
        _alone[key] = train({}, {}, **case)
    return _alone[key]


def check(ranks: Ranks, axes: dict[str, Any], options: dict[str, Any], **case: Any) -> dict[str, torch.Tensor]:
    """The final weights of one process, once those of the layout have been found the same."""
    losses, norms, pieces, logits = alone(**{k: v for k, v in case.items() if k != "fixed"})
    want = {name: boxes[0][1] for name, boxes in pieces.items()}
    answers = ranks.run(Layout(**axes).size, _train, axes, options, case)
    for got_losses, got_norms, _, got_logits in answers:
        # Of few labels rounding is not averaged over many.
        assert got_losses == pytest.approx(losses, abs=5e-6 if case.get("one_place") else 1e-6)
        assert got_norms == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(got_logits, logits, atol=2e-5, rtol=0)
    got = assembled(answers, {name: tuple(value.shape) for name, value in want.items()})
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    return want


def _train(axes: dict[str, Any], options: dict[str, Any], case: dict[str, Any]) -> Any:
    return train(axes, options, **case)


def named(*often: str, full: Iterable[str] = ()) -> list[Any]:
    """`full` ones are more of the same kind: run by `make test-full`."""
    return [*often, *(pytest.param(n, marks=pytest.mark.full) for n in full if n not in often)]


OFTEN = (
    "tp2 with sequence parallel, all to all", "data 2, all gather", "tp2 x dp2, experts over data", "cp2",
    "tp2 inside experts",
)  # fmt: skip


@pytest.mark.parametrize("name", named(*OFTEN, full=EXPERT_LAYOUTS))
def test_experts_train_the_same_in_layout(name: str, ranks: Ranks) -> None:
    axes, dispatch = EXPERT_LAYOUTS[name]
    want = check(ranks, axes, dict(dispatch=dispatch))
    first = {n: start(n, tuple(value.shape), False) for n, value in want.items()}
    moved = [n for n, value in want.items() if not torch.allclose(value, first[n], atol=1e-4)]
    assert moved == list(want), "it must really have trained"


SKEWED = ("tp2", "data 2, all to all", "data 2, all gather", "sharding 2", "tp2 inside experts")


@pytest.mark.parametrize("name", named("data 2, all to all", full=SKEWED))
def test_all_tokens_may_go_to_two_experts_and_none_to_the_others(name: str, ranks: Ranks) -> None:
    axes, dispatch = EXPERT_LAYOUTS[name]
    want = check(ranks, axes, dict(dispatch=dispatch), skewed=True)
    before = start("layers.1.mlp.experts.down.weight", (8 * 32, 12), True).view(8, -1)
    after = want["layers.1.mlp.experts.down.weight"].view(8, -1)
    decayed = before * (1 - 1e-3 * 0.1) ** STEPS
    assert [bool(torch.allclose(a, b, atol=1e-7)) for a, b in zip(after, decayed)] == [False] * 2 + [True] * 6


@pytest.mark.parametrize("name", named("data 2, all to all", full=("tp2", "sharding 4 in two copies", "cp2")))
def test_experts_need_not_divide(name: str, ranks: Ranks) -> None:
    axes, dispatch = EXPERT_LAYOUTS[name]
    check(ranks, axes, dict(dispatch=dispatch), experts=5)


@pytest.mark.parametrize("dispatch", named(GATHER, full=(TO_ALL,)))
def test_data_ranks_may_have_rows_of_different_length(dispatch: str, ranks: Ranks) -> None:
    check(ranks, dict(dp=2, experts="data"), dict(dispatch=dispatch), fixed=False)


@pytest.mark.parametrize("dispatch", named(full=(TO_ALL, GATHER)))
def test_what_is_computed_again_travels_again(dispatch: str, ranks: Ranks) -> None:
    check(ranks, dict(dp=2, tp=2, experts="data", sequence_parallel=True), dict(dispatch=dispatch, recompute="full"))


COMPILED = (
    "tp2", "tp2 with sequence parallel, all to all", "data 2, all gather", "data 2, all to all", "tp2 inside experts",
    "pp2 x dp2", "cp2", "tp2 x sharding 2, experts over data",
)  # fmt: skip


@pytest.mark.parametrize("name", named("sharding 2", full=COMPILED))
@pytest.mark.full
def test_compiled_layers_with_experts_train_the_same_in_layout(name: str, ranks: Ranks) -> None:
    axes, dispatch = EXPERT_LAYOUTS[name]
    check(ranks, axes, dict(dispatch=dispatch, compile=True), one_place=True)


ADAPTED = (
    "tp2", "tp2 with sequence parallel, all to all", "data 4 in two copies", "tp2 x sharding 2, experts over data",
    "tp2 x dp2, over all, two copies", "tp2 inside experts with sequence parallel", "tp2 x dp2, experts over data",
    "pp2 x dp2",
)  # fmt: skip


@pytest.mark.parametrize("name", named("data 2, all to all", full=("sharding 2", "tp2 inside experts", *ADAPTED)))
def test_adapters_on_experts_train_the_same_in_layout(name: str, ranks: Ranks) -> None:
    axes, dispatch = EXPERT_LAYOUTS[name]
    want = check(ranks, axes, dict(dispatch=dispatch), lora=ALL)
    assert any(".experts.down.lora." in name for name in want)


@pytest.mark.parametrize("name", named(full=("tp2 with sequence parallel, all to all", "tp2", "sharding 2")))
def test_adapters_on_routers_alone_train_the_same_in_layout(name: str, ranks: Ranks) -> None:
    axes, dispatch = EXPERT_LAYOUTS[name]
    want = check(ranks, axes, dict(dispatch=dispatch), lora=("gate",))
    assert {name.rpartition(".lora.")[0] for name in want} == {"layers.1.mlp.router", "layers.2.mlp.router"}


@pytest.mark.parametrize("schedule", named(full=("interleaved", "zero_bubble")))
def test_experts_work_under_every_pipeline_schedule(schedule: str, ranks: Ranks) -> None:
    check(ranks, dict(pp=2, virtual_stages=2, dp=2, experts="data"), dict(schedule=schedule), layers=4)


AHEAD = {
    "tp2 with sequence parallel": dict(tp=2, sequence_parallel=True, experts="tp"),
    "pp2": dict(pp=2),
    "pp2 x dp2": dict(pp=2, dp=2, experts="data"),
    "pp2 x tp2": dict(pp=2, tp=2, experts="tp", sequence_parallel=True),
    "cp2": dict(cp=2, experts="data"),
    "sharding 2": dict(fsdp=2, experts="data", sharding_stage=3),
}


@pytest.mark.parametrize("name", named("pp2", full=AHEAD))
def test_layers_that_predict_further_tokens_train_the_same_in_layout(name: str, ranks: Ranks) -> None:
    want = check(ranks, AHEAD[name], {}, mtp="trains")
    before = {n: whole_value(n, tuple(v.shape)) for n, v in want.items() if n.startswith("mtp.")}
    assert len(before) == 9
    assert not any(torch.allclose(want[n], value, atol=1e-4) for n, value in before.items())


@pytest.mark.parametrize("name", named("cp2", full=AHEAD))
def test_so_they_do_where_only_some_ranks_have_labels(name: str, ranks: Ranks) -> None:
    check(ranks, AHEAD[name], {}, mtp="trains", tied=False, one_place=True)


@pytest.mark.full
def test_an_embedding_is_on_the_last_stage_too_where_further_tokens_are_embedded(ranks: Ranks) -> None:
    check(ranks, dict(pp=2), {}, mtp="trains", tied=False)


@pytest.mark.parametrize("name", named(full=("sharding 2", "pp2")))
def test_layers_that_predict_further_tokens_may_rest(name: str, ranks: Ranks) -> None:
    assert not any(n.startswith("mtp.") for n in check(ranks, AHEAD[name], {}, mtp="rests"))


@pytest.mark.full
def test_a_head_that_two_losses_share_trains_the_same_with_backward_in_two(ranks: Ranks) -> None:
    check(ranks, dict(pp=2), dict(schedule="zero_bubble"), mtp="trains")
