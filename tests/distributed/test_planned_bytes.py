"""Bytes the planner predicts of every rank against tensors that ranks really hold after a step: weights, gradients,
masters, moments. Real processes over gloo, several layouts, three models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from erniekit.data.collate import one_document
from erniekit.devices import pick
from erniekit.lora.inject import inject
from erniekit.lora.settings import LoRASettings
from erniekit.losses.causal import causal_loss
from erniekit.models import MODELS
from erniekit.models.config import DecoderConfig, MoEShape
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.schedule import Schedule
from erniekit.optim.storage import Storage
from erniekit.parallel.apply import SpreadOptions, parallelise
from erniekit.parallel.gradients import local
from erniekit.parallel.layout import Layout, fit
from erniekit.parallel.mesh import World
from erniekit.parallel.sharding_table import plain, sharding_of
from erniekit.planner.static_bytes import StorageKinds, TensorBlocks, of_tensor
from erniekit.recipes.build import keep_frozen_as_computed
from erniekit.recipes.optimiser import place_of
from erniekit.recipes.planning import packed_bits
from erniekit.train.step import TrainStep
from parity.test_layouts import micro_batches
from support.rank_bytes import of_rank
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

DENSE = DecoderConfig(
    family="ernie4_5", vocab_size=61, hidden_size=64, intermediate_size=80, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=16, rms_norm_eps=1e-5, rope_theta=1e4, rope_style="pairs", max_positions=128, tie_word_embeddings=True,
)  # fmt: skip
EXPERTS = replace(
    DENSE, family="ernie4_5_moe", tie_word_embeddings=False,
    moe=MoEShape(experts=8, choices=2, width=16, shared_width=32, start=1, end=3),
)  # fmt: skip


def model_of(config: DecoderConfig, lora: bool, dtype: torch.dtype) -> Any:
    spec = MODELS.get(config.family)
    with torch.device("meta"):
        model = spec.cast(spec.build(config), dtype)
        if lora:
            inject(model, LoRASettings.resolve(rank=4), seed=0)
    return model


def storing_of(model: Any, compute: int, moments: str, masters: str) -> StorageKinds:
    named = [(plain(n), p) for n, p in model.named_parameters()]
    fp32 = frozenset(n for n, p in named if p.dtype == torch.float32) if compute == 2 else frozenset()
    trained = frozenset(n for n, p in named if p.requires_grad)
    return StorageKinds(trained, fp32, compute=compute, masters=masters, moments=moments, fused=False)


def held(axes: dict[str, Any], config: DecoderConfig, lora: bool, compute: int, moments: str, masters: str) -> Any:
    """(counted, predicted) of this rank: weights, gradients, masters, moments."""
    layout = fit(Layout(**axes).size, Layout(**axes))
    rank = torch.distributed.get_rank() if layout.size > 1 else 0
    world, spec, device = World(layout, rank), MODELS.get(config.family), pick("cpu")
    dtype = torch.float32 if compute == 4 else torch.bfloat16
    whole = model_of(config, lora, dtype)
    model = model_of(config, lora, torch.float32 if layout.fsdp > 1 else dtype)
    keep_frozen_as_computed(model, {plain(n): p.dtype for n, p in whole.named_parameters()})
    sharding = sharding_of(model, spec.plan, layout)

    def fill(name: str, piece: torch.Tensor) -> None:
        piece.normal_(0, 0.05, generator=torch.Generator().manual_seed(len(name)))

    engine = parallelise(model, sharding, world, device, dtype, causal_loss, fill, one_document, SpreadOptions())
    named = dict((plain(n), p) for part in engine.parts for n, p in part.named_parameters())
    trained = [(n, p) for n, p in named.items() if p.requires_grad]
    places = {n: place_of(n, sharding, rank, 0, device.handle) for n, _ in trained} if moments == "8bit" else {}
    storage = Storage(moments=moments, masters=masters, places=places)
    optimizer = AdamW(make_groups(trained, config.num_layers, 0.1), (0.9, 0.95), 1e-6, storage=storage)
    gradients: list[int] = []
    update = optimizer.step

    def counting(*args: Any) -> None:
        gradients.append(sum(size(g) for g in optimizer.gradients().values()))
        update(*args)

    optimizer.step = counting  # type: ignore[method-assign]
    batches = micro_batches(1, layout, rank, one_place=False)
    TrainStep(engine, optimizer, Schedule("constant", 1e-3, 99))(batches, 1)
    masters_held = [*optimizer.remainders.values()]
    masters_held += [m for n, m in optimizer.masters.items() if m is not optimizer.params[n]]
    states = [t for state in optimizer._states.values() for t in state.values()]
    counted = (
        sum(size(p) for p in named.values()), gradients[0], sum(map(size, masters_held)), sum(map(size, states)),
    )  # fmt: skip
    share = of_rank(sharding, rank, storing_of(whole, compute, moments, masters), len(batches))
    return counted, (share.weights, share.gradients, share.master, share.moments)


def size(tensor: torch.Tensor) -> int:
    own = local(tensor.detach())
    return own.numel() * own.element_size()


CASES: dict[str, tuple[Any, ...]] = {
    "one rank": (dict(), DENSE, False, 2, "fp32", "fp32"),
    "one rank, 8 bit": (dict(), DENSE, False, 2, "8bit", "exact16"),
    "one rank, none": (dict(), EXPERTS, False, 2, "bf16", "none"),
    "dp2": (dict(dp=2), DENSE, False, 4, "fp32", "fp32"),
    "tp2": (dict(tp=2), DENSE, False, 2, "8bit", "fp32"),
    "tp2 sp": (dict(tp=2, sequence_parallel=True), EXPERTS, False, 4, "fp32", "fp32"),
    "pp2": (dict(pp=2), DENSE, False, 2, "fp32", "fp32"),
    "pp2 lora": (dict(pp=2), EXPERTS, True, 2, "fp32", "fp32"),
    "stage1": (dict(fsdp=2, sharding_stage=1), DENSE, False, 4, "fp32", "fp32"),
    "stage3": (dict(fsdp=2, sharding_stage=3), EXPERTS, False, 4, "bf16", "fp32"),
    "ep2": (dict(dp=2, experts="data"), EXPERTS, False, 4, "fp32", "fp32"),
    "ep2 stage3": (dict(fsdp=2, sharding_stage=3, experts="data"), EXPERTS, False, 4, "fp32", "fp32"),
    "cp2": (dict(cp=2), DENSE, True, 4, "fp32", "fp32"),
    "stage3 lora": (dict(fsdp=2, sharding_stage=3), EXPERTS, True, 2, "fp32", "fp32"),
}
FULL = ("tp2 sp", "pp2 lora", "stage1", "ep2 stage3", "cp2", "stage3 lora")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if n in FULL else n for n in CASES])
def test_every_rank_holds_what_was_predicted(name: str, ranks: Ranks) -> None:
    case = CASES[name]
    count = Layout(**case[0]).size
    answers = [held(*case)] if count == 1 else ranks.run(count, held, *case)
    for counted, predicted in answers:
        for kind, want, got in zip(("weights", "gradients", "masters", "moments"), counted, predicted):
            assert got == pytest.approx(want, rel=0.01, abs=64), f"{kind}: {predicted} for {counted}"


def test_stage_3_cuts_packed_weights_and_gathers_them_and_the_other_stages_do_not() -> None:
    model = model_of(EXPERTS, True, torch.bfloat16)
    bits = packed_bits([plain(n) for n, _ in model.named_parameters()], "wint4/8")
    storing = replace(storing_of(model, 2, "fp32", "fp32"), bits=bits)
    for axes, ranks in ((dict(sharding_stage=1), 1), (dict(sharding_stage=3), 2), (dict(sharding_stage=3, cp=2), 4)):
        layout = Layout(fsdp=2, **axes)
        sharding = sharding_of(model, MODELS.get(EXPERTS.family).plan, layout)
        sharding.packed = set(bits)
        blocks = TensorBlocks(sharding, tuple(EXPERTS.sparse(n) for n in range(EXPERTS.num_layers)), storing)
        alone = sharding_of(model, MODELS.get(EXPERTS.family).plan, Layout())
        for name in bits:
            whole, share = of_tensor(alone, name, 0, storing), of_tensor(sharding, name, 1, storing)
            assert share.weights == whole.weights / ranks
            assert share.gathered == (whole.weights if ranks > 1 else 0)
        gathered = blocks.stage(layout, range(EXPERTS.num_layers), True, True, 1).gathered
        assert gathered == of_rank(sharding, 0, storing).gathered


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize(
    "axes",
    [
        dict(), dict(tp=4), dict(pp=2), dict(pp=2, virtual_stages=2), dict(fsdp=4, sharding_stage=3),
        dict(pp=2, fsdp=2, tp=2), dict(dp=4, experts="data"), dict(dp=4, experts="data", ep=2),
        dict(tp=2, fsdp=4, experts="world", sequence_parallel=True), dict(fsdp=8, experts="data", ep=2),
    ],
    ids=str,
)  # fmt: skip
def test_one_layer_of_each_kind_stands_for_all_on_the_fullest_rank(config: DecoderConfig, axes: dict[str, Any]) -> None:
    if axes.get("experts") and config.moe is None:
        axes = {k: v for k, v in axes.items() if k not in ("experts", "ep")}
    layout = fit(Layout(**axes).size, Layout(**axes))
    model = model_of(config, False, torch.bfloat16)
    sharding = sharding_of(model, MODELS.get(config.family).plan, layout)
    storing = storing_of(model, 2, "fp32", "fp32")
    blocks = TensorBlocks(sharding, tuple(config.sparse(n) for n in range(config.num_layers)), storing)
    for stage in range(layout.pp):
        mine = [n for s in range(stage, len(sharding.stages()), layout.pp) for n in sharding.stages()[s]]
        ranks_of = [r for r in range(layout.size) if layout.coords(r)["pp"] == stage]
        exact = max((of_rank(sharding, r, storing, 2) for r in ranks_of), key=lambda share: share.weights)
        found = blocks.stage(layout, mine, stage == 0, stage == layout.pp - 1, 2)
        assert found.weights == pytest.approx(exact.weights)
        assert found.moments == pytest.approx(exact.moments)
        assert found.gradients == pytest.approx(exact.gradients)
