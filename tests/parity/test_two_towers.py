"""A model with two towers trains on many ranks as on one: that of a tiny ERNIE-4.5-VL, and one for sound.

All that the second one needs is in this file: its modules, its InputTower and its input in a batch. Some rows have
pictures, some have sound, some both and some neither, so that every tower has ranks on which it encodes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from erniekit.data.collate import one_document
from erniekit.data.types import IGNORE, Batch
from erniekit.devices import pick
from erniekit.losses.causal import causal_loss
from erniekit.model_contract import Tower, front_prefixes
from erniekit.models import MODELS
from erniekit.models.layers.linear import Linear
from erniekit.models.layers.tower import InputTower
from erniekit.models.layers.vision_language import VisionLanguageDecoder
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import layer_factor, make_groups
from erniekit.optim.schedule import Schedule
from erniekit.parallel.apply import SpreadOptions, parallelise
from erniekit.parallel.context import split
from erniekit.parallel.dealt_inputs import DealtInputs
from erniekit.parallel.gradients import local
from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from erniekit.parallel.plan import Plan, column, dealt, replicate
from erniekit.parallel.plan import row as by_row
from erniekit.parallel.sharding_table import plain, sharding_of
from erniekit.train.step import TrainStep
from parity.test_expert_layouts import named
from parity.test_layouts import assembled
from parity.test_vl_layouts import LENGTH, ROWS, SHAPE, start
from parity.test_vl_layouts import row as row_with_pictures
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

STEPS, CHANNELS, JOINED = 3, 5, 2  # JOINED: frames that become one feature
SPEC = MODELS.get("ernie4_5_vl_moe")
PLANS: dict[str, Plan] = {
    "dealt": {"audio.*": dealt()},
    "whole": {"audio.*": replicate()},
    "cut": {"audio.up": column(), "audio.down": by_row()},
}


class Sound(NamedTuple):
    frames: torch.Tensor  # fp32 [frames of all clips, CHANNELS]
    sizes: tuple[int, ...]  # frames of each clip
    places: torch.Tensor  # int64 [features]


class Ear(nn.Module):
    """Two linears over frames, of which each two stand side by side."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = Linear(JOINED * CHANNELS, width, bias=True), Linear(width, hidden, bias=True)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(F.gelu(self.up(frames.view(len(frames) // JOINED, JOINED * CHANNELS))))
        return result


class SoundTower(InputTower):
    name = "audio"
    prefixes = ("audio.",)

    def __init__(self, ear: Ear, plan: Plan) -> None:
        super().__init__()
        self.ear, self.plan = ear, plan

    def modules(self) -> Sequence[nn.Module]:
        return (self.ear,)

    def encode_here(self, inputs: Sound) -> torch.Tensor:
        result: torch.Tensor = self.ear(inputs.frames)
        return result

    def counts(self, inputs: Sound) -> list[int]:
        return [size // JOINED for size in inputs.sizes]

    def costs(self, inputs: Sound) -> list[float]:
        return [float(size) for size in inputs.sizes]

    def select(self, inputs: Sound, items: Sequence[int]) -> Sound:
        parts = inputs.frames.split(inputs.sizes)
        frames = torch.cat([parts[n] for n in items]) if items else inputs.frames[:0]
        return Sound(frames, tuple(inputs.sizes[n] for n in items), inputs.places)

    def nothing(self, x_BLH: torch.Tensor) -> Sound:
        return Sound(x_BLH.new_zeros(0, CHANNELS), (), torch.zeros(0, dtype=torch.int64, device=x_BLH.device))


class SeesAndHears(VisionLanguageDecoder):
    def __init__(self, plan: Plan) -> None:
        super().__init__(SHAPE)
        self.audio = Ear(24, SHAPE.hidden_size)
        self.sound = SoundTower(self.audio, plan)

    def towers(self) -> Mapping[str, Tower]:
        return {**super().towers(), self.sound.name: self.sound}


def row(step: int, number: int) -> Batch:
    """Of four rows 0 and 2 have pictures, 0 and 3 sound: a clip of 4 frames in the first document, one of 6 in the
    second."""
    batch = row_with_pictures(step, number, number % 2 == 0)
    if number in (1, 2):
        return batch
    draw, second = torch.Generator().manual_seed(1000 * step + number), int(batch.cu_seqlens[1]) + 10
    places = torch.tensor([0, 1, second, second + 1, second + 2])
    batch.labels[0, places] = IGNORE
    sound = Sound(torch.randn(10, CHANNELS, generator=draw), (4, 6), places)
    return replace(batch, inputs={"audio": sound}, num_label_tokens=int((batch.labels != IGNORE).sum()))


def train(
    axes: dict[str, Any], plan: str, frozen: bool, options: dict[str, Any]
) -> tuple[list[float], list[float], Any, Any]:
    """Losses and gradient norms of the steps; then this rank's pieces of the weights and of another step's gradient."""
    layout = Layout(**axes)
    rank = torch.distributed.get_rank() if layout.size > 1 else 0
    world = World(layout, rank)
    with torch.device("meta"):
        model: Any = SeesAndHears(PLANS[plan])
    for name, param in model.named_parameters():
        if frozen and name.startswith(front_prefixes(model)):
            param.requires_grad_(False)
    sharding = sharding_of(model, SPEC.plan, layout)

    def fill(name: str, piece: torch.Tensor) -> None:
        whole = start(name, sharding.shape(name))
        for box in sharding.boxes(name, rank):
            piece[box.local_slices] = whole[box.global_slices]

    engine = parallelise(
        model, sharding, world, pick("cpu"), torch.float32, causal_loss, fill, one_document, SpreadOptions(**options)
    )
    dealt_out = {name for name, tower in model.towers().items() if isinstance(tower.encode, DealtInputs)}
    assert dealt_out == ({"vision", *(["audio"] if plan == "dealt" else [])} if layout.tp > 1 else set())
    held = [(plain(n), p) for part in engine.parts for n, p in part.named_parameters()]
    in_front = {name.partition(".")[0] for name, _ in held if name.startswith(front_prefixes(model))}
    assert in_front == ({"tower", "resampler", "audio"} if world.at["pp"] == 0 else set())
    params = [(name, param) for name, param in held if param.requires_grad]
    optimizer = AdamW(make_groups(params, 3, 0.1), (0.9, 0.95), 1e-6)
    step = TrainStep(engine, optimizer, Schedule("constant", 1e-3, 99))
    mine = slice(layout.data_rank(rank), ROWS, layout.data_ranks)
    results = [step([row(k, number) for number in range(ROWS)][mine], k) for k in range(1, STEPS + 1)]
    engine.forward_backward([row(99, number) for number in range(ROWS)][mine], [50.0] * len(range(ROWS)[mine]))
    gradients = optimizer.all_gradients()
    if engine.sync is not None:
        engine.sync.reduce(gradients)
    pieces: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for name, param in params:
        kept = dict(sharding.holders(name)).get(rank, ())
        for found, value in zip(pieces, (local(param.detach()), local(gradients[name]))):
            if kept:
                found[name] = [(box.global_slices, value[box.local_slices].clone()) for box in kept]
    return [r.loss for r in results], [r.grad_norm for r in results], *pieces


_alone: dict[bool, Any] = {}


def check(ranks: Ranks, axes: dict[str, Any], plan: str, frozen: bool = False, **options: Any) -> None:
    if frozen not in _alone:
        _alone[frozen] = train({}, plan, frozen, {})  # plans are of ranks
    losses, norms, *wanted = _alone[frozen]
    answers = ranks.run(Layout(**axes).size, train, axes, plan, frozen, options)
    for got_losses, got_norms, *_ in answers:
        assert got_losses == pytest.approx(losses, abs=2e-6)
        assert got_norms == pytest.approx(norms, rel=2e-5)
    for kind, pieces in enumerate(wanted):
        want = {name: boxes[0][1] for name, boxes in pieces.items()}
        assert any(name.startswith("audio.") for name in want) != frozen
        assert all(bool(value.any()) for value in want.values()), "every weight must really have a gradient"
        found = [(None, None, answer[2 + kind], None) for answer in answers]
        got = assembled(found, {name: tuple(value.shape) for name, value in want.items()})
        for name, value in want.items():
            # A step moves a weight by 1e-3; where gradients are tiny rounding is a larger share of it.
            most = 1e-4 * float(value.abs().max()) if kind else 5e-5
            torch.testing.assert_close(got[name], value, atol=most, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


SP = dict(tp=2, experts="tp", sequence_parallel=True)
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "data 2": (dict(dp=2), "dealt"),
    "sharding 2": (dict(fsdp=2, sharding_stage=3), "dealt"),
    "tp2": (dict(tp=2), "dealt"),
    "tp2, sound whole": (dict(tp=2), "whole"),
    "tp2, sound cut": (dict(tp=2), "cut"),
    "tp2 with sequence parallel": (SP, "dealt"),
    "tp2 with sequence parallel, sound whole": (SP, "whole"),
    "pp2": (dict(pp=2), "dealt"),
    "cp2": (dict(cp=2), "dealt"),
    "tp2 x sharding 2": (dict(tp=2, fsdp=2, experts="world", sequence_parallel=True), "dealt"),
    "pp2 x tp2": (dict(pp=2, tp=2, experts="tp", sequence_parallel=True), "whole"),
    "cp2 x sharding 2": (dict(cp=2, fsdp=2), "dealt"),
}
OFTEN = ("sharding 2", "pp2")  # the others run so with one tower: test_vl_layouts.py


@pytest.mark.parametrize("name", named(*OFTEN, full=LAYOUTS))
def test_a_model_with_two_towers_trains_the_same_in_layout(name: str, ranks: Ranks) -> None:
    check(ranks, *LAYOUTS[name])


def test_a_second_tower_that_is_computed_again_trains_the_same(ranks: Ranks) -> None:
    check(ranks, dict(fsdp=2), "dealt", recompute="full")


@pytest.mark.parametrize("axes", [dict(fsdp=2), pytest.param(SP, marks=pytest.mark.full)], ids=["sharding 2", "tp2"])
def test_two_frozen_towers_in_front_of_a_trained_model(axes: dict[str, Any], ranks: Ranks) -> None:
    """Where weights are gathered, every rank calls both for every row: else this waits for ever."""
    check(ranks, axes, "dealt", frozen=True)


def test_a_tower_with_cut_weights_is_refused_where_ranks_have_slices_of_rows(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match="tower audio: under sequence parallelism"):
        ranks.run(2, train, SP, "cut", False, {})


def test_what_a_tower_hears_moves_its_document_alone_and_its_places_are_no_other_towers() -> None:
    torch.manual_seed(0)
    model, batch = SeesAndHears(PLANS["dealt"]), row(1, 0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(start(name, tuple(param.shape)))
    assert batch.vision is not None
    assert batch.inputs is not None
    sound: Sound = batch.inputs["audio"]
    assert not set(sound.places.tolist()) & set(batch.vision.places.tolist())
    other = sound._replace(frames=torch.cat((sound.frames[:4], sound.frames[4:] + 1)))
    with torch.no_grad():
        before, after = (
            model(batch.input_ids, batch.positions, batch.documents(), batch.max_doc, more=each.more())[0]
            for each in (batch, batch.with_tower_inputs({**batch.tower_inputs(), "audio": other}))
        )
    moved = (before - after).abs().amax(-1) > 1e-6
    assert moved.tolist() == [int(sound.places[2]) <= i < 28 for i in range(LENGTH)]


def test_weights_of_every_tower_are_in_front_and_come_with_plans_of_their_own() -> None:
    with torch.device("meta"):
        model = SeesAndHears(PLANS["cut"])
    table = sharding_of(model, SPEC.plan, Layout(tp=2, pp=2))
    assert table.front == ("tower.", "resampler.", "audio.") == front_prefixes(model)
    assert {table.stages_of(name) for name in table.names() if name.startswith(table.front)} == {(0,)}
    assert table.rule("audio.up.weight") == column()
    assert table.rule("tower.patch.weight") == table.rule("resampler.proj.weight") == dealt()
    assert layer_factor("audio.up.weight", 3, 0.5, table.front) == 0.5


def test_a_cut_sequence_keeps_the_clips_its_tokens_show() -> None:
    batch = row(1, 0)
    found = [split(batch, rank, 2, SeesAndHears(PLANS["dealt"]).towers()) for rank in range(2)]
    # Chunks of 8: rank 0 has the first and the last, rank 1 those between.
    first = int(batch.cu_seqlens[1]) + 10
    shown = [[True, first + 2 >= 24], [False, first < 24]]
    for part, kept in zip(found, shown):
        assert part.inputs["audio"].sizes == tuple(size for size, one in zip((4, 6), kept) if one)
        assert len(part.inputs["audio"].frames) == sum(part.inputs["audio"].sizes)
    with pytest.raises(KeyError, match="audio"):
        split(batch, 0, 2, {"vision": SeesAndHears(PLANS["dealt"]).towers()["vision"]})


def test_inputs_of_towers_follow_a_batch_to_its_device() -> None:
    batch = row(1, 0)
    sound = batch.tower_inputs()["audio"]
    assert [list(batch.tower_inputs()), list(batch.with_tower_inputs({}).tower_inputs())] == [["vision", "audio"], []]
    assert any(tensor is sound.frames for tensor in batch.tensors())
    moved = batch.to(torch.device("meta"))
    assert moved.inputs is not None
    assert {moved.inputs["audio"].frames.device.type, moved.inputs["audio"].places.device.type} == {"meta"}
    assert moved.inputs["audio"].sizes == (4, 6)
    assert moved.more().input_of("audio") is moved.inputs["audio"]
    assert moved.more().input_of("vision") is moved.vision
