"""Packed weights that wait in host memory: the same numbers, two rooms on the device, and the next layer on its way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.demo.tiny import make_tiny_model
from erniekit.devices import pick
from erniekit.lora.frozen_base import store_frozen
from erniekit.lora.inject import inject, lora_linears
from erniekit.lora.settings import LoRASettings
from erniekit.models.init import init_weights
from erniekit.parallel import host_layers
from erniekit.parallel.host_layers import HostLayers
from erniekit.parallel.recompute import apply_recompute

LAYERS = 5
HOSTED = (0, 1, 3, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("moe"), family="ernie4_5_moe")


def adapted(folder: Path, hosted: tuple[int, ...], base: str) -> tuple[nn.Module, HostLayers]:
    """As parallel/apply.py builds it: wrapped, computed again, packed one weight after the other."""
    known = ModelFolder(folder)
    model = known.spec.build(replace(known.config, num_layers=LAYERS))
    init_weights(model, 0, known.config.init_std)
    inject(model, LoRASettings.resolve(rank=4), seed=1)
    with torch.no_grad():
        for _, layer in lora_linears(model):
            for pair in layer.pairs().values():
                pair.B.normal_(0, 0.05, generator=torch.Generator().manual_seed(0))
    plain = {n: layer.base.weight.detach().clone() for n, layer in lora_linears(model)}
    shapes = {
        n: (w.shape[0] // getattr(model.get_submodule(n).base, "experts", 1), w.shape[1]) for n, w in plain.items()
    }
    store_frozen(model, base, "bf16", lambda name: [shapes[name.removesuffix(".weight")]])
    host = HostLayers(model, hosted, pick("cpu"))
    apply_recompute(model, "full")
    for name, layer in lora_linears(model):
        if getattr(layer.base, "packed_shape", None) is not None:
            layer.base.pack(plain[name])
            host.take(layer.base)
    return model.train(), host


def steps(model: nn.Module, count: int = 3) -> list[torch.Tensor]:
    """Losses, and the gradients of a last one."""
    trained = [p for p in model.parameters() if p.requires_grad]
    out = []
    for k in range(count):
        ids = torch.randint(3, 1000, (2, 24), generator=torch.Generator().manual_seed(k))
        loss = model(ids, labels=ids)
        grads = torch.autograd.grad(loss, trained, allow_unused=True)
        out += [loss.detach(), *(g for g in grads if g is not None)]
        with torch.no_grad():
            for p, g in zip(trained, grads):
                p.sub_(torch.zeros_like(p) if g is None else 1e-3 * g.sign())
    return out


@pytest.mark.parametrize(("base", "block"), [("wint4/8", 1000), ("nf4", 1 << 26)])
def test_losses_and_gradients_are_bit_for_bit_those_of_weights_on_the_device(
    folder: Path, base: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_layers, "BLOCK", block)
    want = steps(adapted(folder, (), base)[0])
    model, host = adapted(folder, HOSTED, base)
    packed = sum(t.like.nbytes for tensors in host.tensors.values() for t in tensors)
    assert packed <= host.host_bytes <= 1.1 * packed
    got = steps(model)
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert len(host._buffers) == 2
    assert sum(buffer.numel() for buffer in host._buffers) < host.host_bytes


def test_a_step_copies_each_layer_twice_but_those_at_the_turns_that_are_still_there(folder: Path) -> None:
    model, host = adapted(folder, HOSTED, "wint4/8")
    steps(model, 1)
    before = host.copies
    steps(model, 3)
    assert host.copies - before == 3 * 2 * (len(HOSTED) - 2)


def test_evaluation_and_single_layers_find_their_weights_too(folder: Path) -> None:
    ids = torch.randint(3, 1000, (1, 16), generator=torch.Generator().manual_seed(7))
    want = adapted(folder, (), "wint4/8")[0](ids).detach()
    for hosted in (HOSTED, (2,), tuple(range(LAYERS))):
        model, host = adapted(folder, hosted, "wint4/8")
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(model(ids), want)
        if len(hosted) == 1:
            assert host.copies == 1


def test_weights_of_a_layer_that_is_not_computing_cannot_be_read_by_mistake(folder: Path) -> None:
    model, host = adapted(folder, HOSTED, "wint4/8")
    steps(model, 1)
    for tensors in host.tensors.values():
        for tensor in tensors:
            assert getattr(tensor.holder, tensor.name).is_meta


def test_backward_of_a_layer_reads_its_own_weights_though_rooms_are_filled_again(folder: Path) -> None:
    """The first layer's weights are overwritten in between: without a second copy its gradient would be another's."""
    model, host = adapted(folder, HOSTED, "wint4/8")
    ids = torch.randint(3, 1000, (1, 16), generator=torch.Generator().manual_seed(7))
    loss = model(ids, labels=ids)
    assert 0 not in host._layer_in
    loss.backward()
    assert 0 in host._layer_in
