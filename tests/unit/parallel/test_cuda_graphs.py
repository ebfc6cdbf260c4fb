"""What is recorded as a CUDA graph: the layers as a function of tensors alone. Graphs themselves need a card
(tests/device/test_cuda_graph.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from erniekit.data.types import More, SharedKeys
from erniekit.devices import pick
from erniekit.devices.base import Device
from erniekit.kernels.packed_attention import Packs, packs_of
from erniekit.losses.moe_balance import RouterLosses, RouterLossWeights
from erniekit.models.config import MoEShape
from erniekit.models.layers.attention import Context
from erniekit.models.layers.decoder import Decoder
from erniekit.models.layers.modal import lengths_of
from erniekit.models.layers.moe import MoE
from erniekit.parallel.cuda_graphs import SHARES, Graphed, GraphedLayers, _inputs, _Stack
from support.tiny_config import with_experts
from unit.models import test_modal

LENGTH = test_modal.LENGTH


def decoder() -> Decoder:
    moe = MoEShape(experts=4, choices=2, width=16, shared_width=24, start=1, end=2)
    torch.manual_seed(0)
    model = Decoder(with_experts(moe))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.2)
    for layer in model.layers:
        if isinstance(layer.mlp, MoE):
            layer.mlp.balance = RouterLosses(RouterLossWeights(aux=0.1, z=0.01), torch.ones(()))
    return model


@pytest.mark.parametrize("padded", [False, True])
def test_a_recorded_stack_gives_what_launched_layers_give_and_tells_what_they_tell(padded: bool) -> None:
    model, x = decoder(), torch.randn(2, 12, 32)
    model.records = []
    positions = torch.arange(12).expand(2, 12)
    real = torch.ones(2, 12, dtype=torch.bool)
    real[1, 9:] = False
    ctx = model.context(positions)._replace(real=real if padded else None)
    want = model.run_layers(x, ctx)
    assert {name for name, _ in ctx.record} == {"usage", "router_aux", "router_z"}

    stack = _Stack(model.layers, ctx)
    out, *told = stack(x, *_inputs(ctx))
    torch.testing.assert_close(out, want)
    found = dict(stack.read(told))
    assert found.keys() == ctx.record.keys()
    for key, value in ctx.record.items():
        if isinstance(value, tuple):
            assert found[key][1] == value[1]
            value, found[key] = value[0], found[key][0]
        assert torch.equal(found[key], value), key
    counted = sum(found["usage", 1].tolist())
    assert counted == 2 * (21 if padded else 24)
    kept = found["usage", 1].clone()
    for tensor in told:
        tensor.zero_()  # as the next replay would
    assert torch.equal(found["usage", 1], kept)


def test_padding_is_an_input_only_where_layers_tell_of_themselves() -> None:
    model = decoder()
    real = torch.ones(2, 12, dtype=torch.bool)
    ctx = model.context(torch.arange(12).expand(2, 12))._replace(real=real)
    assert len(_inputs(ctx)) == 2
    assert len(_inputs(ctx._replace(record={}))) == 3
    packs = Packs(torch.tensor([0, 12, 24], dtype=torch.int32), torch.tensor([2, 12, 12]))
    assert len(_inputs(ctx._replace(packs=packs, record={}))) == 4


def test_lists_of_keys_that_documents_share_are_inputs_and_reach_the_layers_of_each_batch() -> None:
    """As of DPO's pairs, whose answers look at one prompt."""

    class Seen(torch.nn.Module):
        def forward(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
            seen.append(ctx)
            return x

    def batch(prompt: int, copies: int = 2) -> Context:
        """A prompt with its first answer, and a second answer of three tokens that looks at the prompt, too."""
        ends = torch.tensor([0, 9, 12], dtype=torch.int32)
        own = torch.arange(12)
        index = torch.cat([own[:9], own[:prompt], own[9:]])
        bounds = torch.tensor([0, 9, 9 + prompt + 3], dtype=torch.int32)
        shared = SharedKeys(index, bounds, 9, copies=copies)
        packs = packs_of(ends, 9, shared, 12)
        return decoder().context(own[None])._replace(packs=packs, shared=shared, kernel="flash")

    seen: list[Context] = []
    first, second = batch(4), batch(6)
    stack = _Stack(torch.nn.ModuleList([Seen()]), first)
    x = torch.randn(1, 12, 32)
    (out,) = stack(x, *_inputs(second))
    assert torch.equal(out, x)
    got, want = seen[0].packs, second.packs
    assert len(_inputs(first)) == 6
    for name in ("bounds", "key_index", "key_bounds", "key_places"):
        assert getattr(first.packs, name).shape == getattr(want, name).shape, "one recording serves both"
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.sizes.tolist() == [64, 12, 12], "room for any documents"
    assert seen[0].shared is None, "nothing of the batch that was recorded"

    model = decoder()
    model.layers = torch.nn.ModuleList([Seen()])
    graphed = Rehearsed(model, pick("cpu"), Graphed(1, (12,), 1))
    for ctx in (first, second, batch(4, copies=4)):
        graphed(x, ctx)
    assert len(graphed.recorded) == 2, "keys that more documents look at are inputs of another shape"


def test_where_nothing_can_be_replayed_layers_are_launched() -> None:
    model, x = decoder(), torch.randn(2, 12, 32)
    ctx = model.context(torch.arange(12).expand(2, 12))
    graphed = GraphedLayers(model, pick("cpu"), Graphed(2, (12,), 1))
    model.train()
    torch.testing.assert_close(graphed(x, ctx), model.run_layers(x, ctx))  # a CPU has no kernels for it
    assert not graphed.recorded


class Rehearsed(GraphedLayers):
    """Everything but the recording itself, which needs a card."""

    def _fits(self, x_BLH: torch.Tensor, ctx: object) -> bool:
        return True

    def _may_record(self) -> bool:
        return True

    def _record(self, x_BLH: torch.Tensor, ctx: object) -> torch.nn.Module:
        return _Stack(self.model.layers, ctx)


def test_each_kind_of_batch_has_a_recording_of_its_own_up_to_the_limit() -> None:
    model, x = decoder(), torch.randn(2, 12, 32)
    graphed = Rehearsed(model, pick("cpu"), Graphed(2, (12,), 1))
    plain = model.context(torch.arange(12).expand(2, 12))
    real = torch.ones(2, 12, dtype=torch.bool)
    for ctx in (plain, plain._replace(record={}), plain._replace(record={}, real=real), plain):
        torch.testing.assert_close(graphed(x, ctx), model.run_layers(x, ctx._replace(record=None)))
        told = {name for name, _ in ctx.record or ()}
        assert told == (set() if ctx.record is None else {"usage", "router_aux", "router_z"})
    assert len(graphed.recorded) == 2, "the third kind was launched"


@dataclass(frozen=True)
class Counted(Device):
    """Of 100 bytes, 10 are held now and `peak` were at most."""

    peak: int = 0

    def allocated(self) -> int:
        return 10

    def reserved(self) -> int:
        return 10

    def peak_allocated(self) -> int:
        return self.peak

    def free_memory(self) -> tuple[int, int]:
        return 90, 100


def test_a_model_with_experts_is_launched_for_two_whole_steps_before_its_memory_is_judged() -> None:
    for peak, room in ((30, True), (60, False)):  # a step's activations must fit twice
        graphed = GraphedLayers(decoder(), Counted("counted", "cpu", 100, peak=peak), Graphed(2, (12,), 3))
        assert [graphed._may_record() for _ in range(6)] == [False] * 6
        assert graphed._may_record() is room


def test_every_length_of_joined_rows_has_a_recording_and_others_are_launched() -> None:
    model = decoder()
    model.records, model.training = [], True
    graphed = GraphedLayers(model, pick("cpu"), Graphed(1, (8, 12, 16), 1))
    assert graphed.most == 3
    rehearsed = Rehearsed(model, pick("cpu"), Graphed(1, (8, 12, 16), 1))
    for length in (8, 12, 16, 12, 8):
        members = torch.zeros(2, length, dtype=torch.bool)
        members[0, :3] = members[1, 3:7] = True
        ctx = model.context(torch.arange(length)[None])._replace(members=members, real=members.any(0, keepdim=True))
        x = torch.randn(1, length, 32)
        want = model.run_layers(x, ctx._replace(record={}))
        torch.testing.assert_close(rehearsed(x, ctx), want)
        assert ctx.record["router_aux", 1][1] == 2, "terms of two rows"
    assert len(rehearsed.recorded) == 3


def test_a_vision_model_is_replayed_by_the_rounded_numbers_of_its_tokens() -> None:
    """Rows beyond a bank's tokens belong to no expert; a batch of text alone is launched."""
    model = test_modal.block().train()
    graphed = Rehearsed(model, pick("cpu"), Graphed(1, (LENGTH,), 1))
    assert model.length_step == max(1, LENGTH // SHARES)
    model.length_step = 8
    x, lengths = torch.randn(1, LENGTH, 16), []
    for count in (7, 8, 3, 17):
        more = More(modality=test_modal.kinds(count), vision_tokens=count)
        ctx = model.context(torch.arange(LENGTH)[None], more=more)
        assert ctx.lengths is not None
        lengths.append(tuple(len(one) for one in ctx.lengths))
        exact = ctx._replace(lengths=lengths_of(more.modality, count))
        torch.testing.assert_close(graphed(x, ctx), model.run_layers(x, exact))
    assert lengths == [(24, 8), (16, 8), (24, 8), (8, 24)]
    assert len(graphed.recorded) == 3
    text = model.context(torch.arange(LENGTH)[None])
    assert not GraphedLayers._fits(graphed, x, text)
