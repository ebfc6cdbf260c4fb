from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.lora.inject import base_state, inject, is_lora_b, lora_state, reset_lora
from erniekit.lora.settings import LoRASettings

IDS = torch.arange(20).view(2, 10)


def test_a_fresh_adapter_changes_nothing(ernie: nn.Module) -> None:
    before = ernie(IDS)
    inject(ernie, LoRASettings.resolve(), seed=1)
    assert torch.equal(ernie(IDS), before)


@pytest.mark.parametrize("shared_a", [False, True])
def test_only_adapters_are_trained_and_no_other_weight_has_one(ernie: nn.Module, shared_a: bool) -> None:
    adapted = inject(ernie, LoRASettings.resolve(shared_a=shared_a), seed=1)
    assert {p.part for p in adapted} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    trained = {name for name, param in ernie.named_parameters() if param.requires_grad}
    assert trained == lora_state(ernie).keys()
    assert all(name.split(".")[2:4] in (["attn", "qkv"], ["attn", "out"], ["mlp", "gate_up"], ["mlp", "down"])
               for name in trained)  # fmt: skip
    assert len(trained) == 3 * (8 if shared_a else 14)


def test_every_adapter_gets_a_gradient(ernie: nn.Module, trained) -> None:
    model = trained(ernie)
    model(IDS).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in lora_state(model).values())
    assert all(p.grad is None for n, p in model.named_parameters() if n not in lora_state(model))


def test_initial_values_depend_on_seed_and_name_alone(paddle: Path) -> None:
    folder = ModelFolder(paddle / "dense_old")
    all_of_it, some, other = folder.build(), folder.build(), folder.build()
    inject(all_of_it, LoRASettings.resolve(), seed=7)
    inject(some, LoRASettings.resolve(targets=["v_proj", "down_proj"]), seed=7)
    inject(other, LoRASettings.resolve(), seed=8)
    values = lora_state(all_of_it)
    assert all(torch.equal(values[name], value) for name, value in lora_state(some).items())
    differing = [n for n in values if n.endswith(".A") and not torch.equal(values[n], lora_state(other)[n])]
    assert len(differing) == 21
    distinct = {tuple(value.flatten().tolist()) for name, value in values.items() if name.endswith(".A")}
    assert len(distinct) == 21  # no two projections start alike


def test_base_state_has_the_plain_models_names_and_tensors(paddle: Path, ernie: nn.Module) -> None:
    plain = ModelFolder(paddle / "dense_old").build().state_dict()
    inject(ernie, LoRASettings.resolve(targets=["q_proj", "down_proj"]), seed=1)
    state = base_state(ernie)
    assert list(state) == list(plain)
    assert all(torch.equal(state[name], plain[name]) for name in plain)
    state["layers.0.attn.qkv.weight"].zero_()  # the model's own memory: loading writes through it
    assert not ernie.layers[0].attn.qkv.weight.any()


def test_only_b_matrices_are_lora_b(ernie: nn.Module) -> None:
    inject(ernie, LoRASettings.resolve(), seed=1)
    names = [name for name, _ in ernie.named_parameters()]
    assert {n for n in names if is_lora_b(n)} == {n for n in lora_state(ernie) if n.endswith(".B")}
    assert not is_lora_b("layers.0.mlp.B")


def test_a_meta_model_is_adapted_first_and_filled_later(paddle: Path, ernie: nn.Module) -> None:
    folder = ModelFolder(paddle / "dense_old")
    with torch.device("meta"):
        model = folder.spec.build(folder.config)
    inject(model, LoRASettings.resolve(), seed=5)
    model.to_empty(device="cpu")
    reset_lora(model, seed=5)
    inject(ernie, LoRASettings.resolve(), seed=5)
    assert all(torch.equal(a, b) for a, b in zip(lora_state(model).values(), lora_state(ernie).values()))


def test_a_fresh_adapter_changes_nothing_in_a_model_with_experts(moe: nn.Module) -> None:
    before = moe(IDS)
    inject(moe, LoRASettings.resolve(targets=[".*", "gate"]), seed=1)
    assert torch.equal(moe(IDS), before)


def test_every_adapter_of_chosen_experts_gets_a_gradient_and_no_expert_weight_has_one(moe: nn.Module, trained) -> None:
    model = trained(moe, LoRASettings.resolve(targets=[".*", "gate"]))
    ids = torch.arange(200).view(4, 50)  # enough for each expert to be chosen
    model(ids).square().mean().backward()
    for name, param in lora_state(model).items():
        grads = param.grad.view(8, -1) if ".experts." in name else param.grad.view(1, -1)
        assert (grads.abs().sum(1) > 0).all(), name
    assert all(p.grad is None for n, p in model.named_parameters() if n not in lora_state(model))


def test_each_expert_starts_from_values_of_its_own_name(paddle: Path) -> None:
    """So that ranks which hold some experts draw the same ones, whatever the layout."""
    folder = ModelFolder(paddle / "moe_old")
    one, other = folder.build(), folder.build()
    inject(one, LoRASettings.resolve(rank=4), seed=7)
    inject(other, LoRASettings.resolve(rank=4, targets=["down_proj"]), seed=7)
    values = lora_state(one)
    assert all(torch.equal(values[name], value) for name, value in lora_state(other).items())
    A = values["layers.2.mlp.experts.down.lora.down_proj.A"].view(8, 4, 24)
    assert len({tuple(expert.flatten().tolist()) for expert in A}) == 8
    assert A.abs().max() <= 24**-0.5
    digest = hashlib.sha256(b"7/layers.2.mlp.experts.down.5.lora.down_proj.A").digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    assert torch.equal(A[5], torch.empty(4, 24).uniform_(-(24**-0.5), 24**-0.5, generator=generator))


def test_an_adapted_router_in_a_16_bit_model_has_adapters_of_the_models_dtype_and_fp32_answers(paddle: Path) -> None:
    folder = ModelFolder(paddle / "moe_old")
    model = folder.build().to(torch.bfloat16)
    for layer in model.layers[1:]:
        layer.mlp.router.float()
    inject(model, LoRASettings.resolve(targets=["gate"]), seed=1)
    router = model.layers[1].mlp.router
    assert {p.dtype for p in lora_state(model).values()} == {torch.bfloat16}
    torch.nn.init.normal_(router.lora["gate"].B)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    routing = router(x)
    pair = router.lora["gate"]
    weight = router.base.weight + pair.scale * pair.B.float() @ pair.A.float()
    assert routing.logits.dtype == torch.float32
    assert torch.equal(routing.logits, x.float() @ weight.t())
    assert router.experts == 8
    assert router.bias is router.base.bias
