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
from erniekit.kernels.stored import PLAIN, kind_of
from erniekit.lora.adapters_off import adapters_off
from erniekit.lora.frozen_base import check, store_frozen
from erniekit.lora.inject import inject, lora_linears, lora_state
from erniekit.lora.layers import LoRARouter
from erniekit.lora.settings import LoRASettings
from erniekit.weight_kinds import BASES


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


def shape_of(model: nn.Module, name: str) -> tuple[int, int]:
    base = model.get_submodule(name.removesuffix(".weight")).base
    rows, width = base.weight.shape
    return rows // getattr(base, "experts", 1), width


def pack(model: nn.Module, base: str = "fp8", products: str = "fp8") -> list[str]:
    """As parallel/apply.py fills a model, here from the weights it has."""
    plain = {n: layer.base.weight.detach().clone() for n, layer in lora_linears(model)}
    left = store_frozen(model, base, products, lambda name: [shape_of(model, name)])
    for name, layer in lora_linears(model):
        if getattr(layer.base, "packed_shape", None) is not None and not layer.base.is_packed:
            layer.base.pack(plain[name])
    return left


def ids() -> torch.Tensor:
    return torch.randint(3, 1000, (2, 12), generator=torch.Generator().manual_seed(0))


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


def test_the_weights_under_adapters_are_packed_and_freed_and_all_others_stay(adapted: Callable) -> None:
    model = adapted(targets=[r"layers\.1\..*", "gate"])
    names = {name for name, _ in lora_linears(model)}
    kept = {n: p for n, p in model.named_parameters() if not (n.endswith(".base.weight") and "router" not in n)}
    gone = [weakref.ref(p) for n, p in model.named_parameters() if n not in kept]
    assert pack(model) == []
    assert dict(model.named_parameters()).keys() == kept.keys()
    assert all(p is kept[n] for n, p in model.named_parameters())
    assert not any(ref() is not None for ref in gone)
    assert len(gone) == 6
    turned = {n for n, layer in lora_linears(model) if getattr(layer.base, "is_packed", False)}
    assert turned == names - {n for n, layer in lora_linears(model) if isinstance(layer, LoRARouter)}
    assert not any(t.dtype == torch.float8_e4m3fn for t in model.state_dict().values())


def test_what_is_packed_is_left_alone(adapted: Callable) -> None:
    model = adapted()
    pack(model)
    before = {n: b.float() for n, b in model.named_buffers()}
    assert store_frozen(model, "fp8", "fp8", lambda name: [(16, 16)]) == []
    assert all(torch.equal(b.float(), before[n]) for n, b in model.named_buffers())


def test_widths_that_fp8_does_not_take_are_left_and_named(adapted: Callable) -> None:
    model = adapted(targets=["q_proj"])
    layer = model.layers[0].attn.qkv
    layer.base.weight = nn.Parameter(layer.base.weight[:-8].clone(), requires_grad=False)
    assert pack(model) == ["layers.0.attn.qkv"]
    assert model.layers[1].attn.qkv.base.is_packed
    assert model.layers[0].attn.qkv.base.weight is not None


def test_a_bias_is_added_and_stays_where_it_was(adapted: Callable) -> None:
    model = adapted(targets=["o_proj"])
    layer = model.layers[0].attn.out
    layer.base.bias = nn.Parameter(torch.randn(layer.base.out_features), requires_grad=False)
    x = torch.randn(3, layer.base.in_features)
    want = layer(x)
    pack(model)
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
            pack(model)
            got = outcome()
    else:
        want = outcome()
        pack(model)
        got = outcome()
    assert 0.005 < apart(got[0], want[0]) < 0.15, "a few products in a row, 4 % each"
    assert apart(torch.cat([g.flatten() for g in got]), torch.cat([w.flatten() for w in want])) < 0.15


def test_a_packed_linear_compiles_whole(adapted: Callable) -> None:
    model = adapted()
    pack(model)
    linear, x = model.layers[0].attn.qkv, torch.randn(3, 128, requires_grad=True)
    whole = torch.compile(lambda x: linear(x).sum(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(*(torch.autograd.grad(f(x), x)[0] for f in (whole, lambda x: linear(x).sum())))


def test_a_device_without_fp8_is_refused_and_a_cpu_is_not() -> None:
    check("fp8", "fp8", torch.device("cpu"), True, "run.yaml")
    with pytest.raises(ConfigError, match=r"frozen_base: fp8 .* NVIDIA") as caught:
        check("fp8", "fp8", torch.device("mps"), False, "run.yaml")
    assert (caught.value.where, caught.value.fix) == ("run.yaml", "frozen_base: bf16")
    check("wint4/8", "bf16", torch.device("mps"), True, "run.yaml")
    check("wint4/8", "fp8", torch.device("mps"), False, "run.yaml")
    with pytest.raises(ConfigError, match=r"frozen_products: fp8 .* NVIDIA") as caught:
        check("wint4/8", "fp8", torch.device("mps"), True, "run.yaml")
    assert caught.value.fix == "frozen_products: bf16"


@pytest.mark.parametrize(("products", "experts"), [("bf16", "int4"), ("fp8", "int4-fp8")])
def test_a_mix_gives_each_role_its_kind(adapted: Callable, products: str, experts: str) -> None:
    model = adapted()
    assert pack(model, "wint4/8", products) == []
    kinds = {name.split(".", 2)[2]: layer.base.kind for name, layer in lora_linears(model)}
    assert kinds == {
        "attn.qkv": "int8", "attn.out": "int8", "mlp.gate_up": "int8", "mlp.down": "int8", "mlp.shared.gate_up": PLAIN,
        "mlp.shared.down": PLAIN, "mlp.experts.gate_up": experts, "mlp.experts.down": experts,
    }  # fmt: skip


def test_widths_that_fp8_does_not_take_are_multiplied_in_16_bit(adapted: Callable) -> None:
    model = adapted(targets=["q_proj"])
    layer = model.layers[0].attn.qkv
    layer.base.weight = nn.Parameter(layer.base.weight[:-8].clone(), requires_grad=False)
    assert pack(model, "int4", "fp8") == []
    assert [model.layers[i].attn.qkv.base.kind for i in (0, 1)] == ["int4", "int4-fp8"]


@pytest.mark.parametrize("base", [kind for kind in BASES if kind not in ("bf16", "fp8")])
def test_answers_and_gradients_are_those_of_the_unpacked_weights(adapted: Callable, base: str) -> None:
    """Bit for bit what a plain model has whose frozen weights are the numbers that were packed."""
    packed, plain = adapted(), adapted()
    pack(packed, base, "bf16")
    with torch.no_grad():
        for (_, layer), (_, other) in zip(lora_linears(packed), lora_linears(plain), strict=True):
            if getattr(layer.base, "is_packed", False):
                other.base.weight.copy_(kind_of(layer.base.stored()).unpack(layer.base.stored(), torch.float32))
    found = []
    for model in (packed, plain):
        logits = model(ids())
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids()[:, 1:].flatten())
        found.append([logits, *torch.autograd.grad(loss, list(lora_state(model).values()))])
    for mine, want in zip(*found, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-6)
