"""What `frozen_base: fp8` does to a model with adapters: which weights, what is freed, what it answers and learns."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import ConfigError
from erniekit.lora.fp8_base import Fp8Base
from erniekit.lora.frozen import check, to_fp8
from erniekit.lora.inject import inject, lora_linears, lora_state
from erniekit.lora.layers import LoRARouter
from erniekit.lora.settings import LoRASettings
from erniekit.lora.switch import adapters_off


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("moe"), family="ernie4_5_moe")


@pytest.fixture
def adapted(folder: Path) -> Callable[..., nn.Module]:
    def make(**settings: object) -> nn.Module:
        model = ModelFolder(folder).build()
        inject(model, LoRASettings.resolve(rank=4, **settings), seed=1)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for _, layer in lora_linears(model):
                for pair in layer.pairs().values():
                    pair.B.normal_(0, 0.05, generator=generator)
        return model

    return make


def ids() -> torch.Tensor:
    return torch.randint(3, 1000, (2, 12), generator=torch.Generator().manual_seed(0))


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


def test_the_weights_under_adapters_are_turned_and_freed_and_all_others_stay(adapted: Callable) -> None:
    model = adapted(targets=[r"layers\.1\..*", "gate"])
    names = {name for name, _ in lora_linears(model)}
    kept = {n: p for n, p in model.named_parameters() if not (n.endswith(".base.weight") and "router" not in n)}
    gone = [weakref.ref(p) for n, p in model.named_parameters() if n not in kept]
    assert to_fp8([model]) == []
    assert dict(model.named_parameters()).keys() == kept.keys()
    assert all(p is kept[n] for n, p in model.named_parameters())
    assert not any(ref() is not None for ref in gone)
    assert len(gone) == 6
    turned = {n for n, layer in lora_linears(model) if isinstance(layer.base, Fp8Base)}
    assert turned == names - {n for n, layer in lora_linears(model) if isinstance(layer, LoRARouter)}
    assert not any(t.dtype == torch.float8_e4m3fn for t in model.state_dict().values())


def test_turning_twice_changes_nothing(adapted: Callable) -> None:
    model = adapted()
    to_fp8([model])
    before = {n: b.float() for n, b in model.named_buffers()}
    to_fp8([model])
    assert all(torch.equal(b.float(), before[n]) for n, b in model.named_buffers())


def test_widths_that_fp8_does_not_take_are_left_and_named(adapted: Callable) -> None:
    model = adapted(targets=["q_proj"])
    layer = model.layers[0].attn.qkv
    layer.base.weight = nn.Parameter(layer.base.weight[:-8].clone(), requires_grad=False)
    assert to_fp8([model]) == ["layers.0.attn.qkv"]
    assert isinstance(model.layers[1].attn.qkv.base, Fp8Base)


def test_a_bias_is_added_and_stays_where_it_was(adapted: Callable) -> None:
    model = adapted(targets=["o_proj"])
    layer = model.layers[0].attn.out
    layer.base.bias = nn.Parameter(torch.randn(layer.base.out_features), requires_grad=False)
    x = torch.randn(3, layer.base.in_features)
    want = layer(x)
    to_fp8([model])
    assert apart(layer(x), want) < 0.05
    assert "layers.0.attn.out.base.bias" in dict(model.named_parameters())


@pytest.mark.parametrize("active", [True, False])
def test_answers_and_the_adapters_gradients_stay_near(adapted: Callable, active: bool) -> None:
    model = adapted()

    def outcome() -> list[torch.Tensor]:
        logits = model(ids())
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids()[:, 1:].flatten())
        if not active:
            return [logits.detach()]
        return [logits.detach(), *torch.autograd.grad(loss, list(lora_state(model).values()))]

    if not active:
        with adapters_off([model]):
            want = outcome()
            to_fp8([model])
            got = outcome()
    else:
        want = outcome()
        to_fp8([model])
        got = outcome()
    assert 0.005 < apart(got[0], want[0]) < 0.15, "a few products in a row, 4 % each"
    assert apart(torch.cat([g.flatten() for g in got]), torch.cat([w.flatten() for w in want])) < 0.15


def test_converted_layers_compile_whole(adapted: Callable) -> None:
    model = adapted()
    to_fp8([model])
    linear, experts = model.layers[0].attn.qkv, model.layers[1].mlp.experts.down
    ends = torch.tensor([1, 1, 4, 4, 4, 6, 6, 7], dtype=torch.int32)

    def run(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return linear(x).sum() + experts(rows, ends).square().sum()

    x, rows = torch.randn(3, 128, requires_grad=True), torch.randn(7, 32, requires_grad=True)
    # grouped products on a CPU ask for the ends' values, which a compiler cannot know: there the graph may break
    compiled = torch.compile(run, backend="aot_eager")
    want, got = (torch.autograd.grad(f(x, rows), (x, rows)) for f in (run, compiled))
    torch.testing.assert_close(got, want)
    one = torch.compile(lambda x: linear(x).sum(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(one(x), x)[0], want[0])


def test_several_ranks_are_refused_and_a_cpu_is_not() -> None:
    check(torch.device("cpu"), 1, True, "run.yaml")
    with pytest.raises(ConfigError, match="2 ranks") as caught:
        check(torch.device("cpu"), 2, False, "run.yaml")
    assert (caught.value.where, caught.value.fix) == ("run.yaml", "frozen_base: bf16")
