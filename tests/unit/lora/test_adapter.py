"""Adapters in and out of models: what fits is loaded exactly, what does not is refused with the keys to set."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.errors import CheckpointError
from erniekit.lora.adapter import Adapter, LowRank, adapter_of, attach, load_adapter
from erniekit.lora.inject import inject, lora_state
from erniekit.lora.settings import LoRASettings

IDS = torch.arange(20).view(2, 10)
SETTINGS = LoRASettings.resolve(rank=3)


@pytest.fixture
def adapter(ernie: nn.Module, trained) -> Adapter:
    return adapter_of(trained(ernie, SETTINGS), SETTINGS)


@pytest.fixture
def fresh(paddle: Path) -> nn.Module:
    return ModelFolder(paddle / "dense_old").build()


def test_an_attached_adapter_answers_as_the_model_it_came_from(
    ernie: nn.Module, adapter: Adapter, fresh: nn.Module
) -> None:
    attach(fresh, adapter)
    assert torch.equal(fresh(IDS), ernie(IDS))
    assert not any(p.requires_grad for p in fresh.parameters())


def test_a_snapshot_can_stand_in_for_the_parameters(ernie: nn.Module, trained) -> None:
    trained(ernie, SETTINGS)
    snapshot = {name: value.detach() * 2 for name, value in lora_state(ernie).items()}
    live, saved = adapter_of(ernie, SETTINGS), adapter_of(ernie, SETTINGS, snapshot)
    assert all(torch.equal(saved.updates[n].B, 2 * live.updates[n].B) for n in live.updates)


@pytest.mark.parametrize(
    ("settings", "said", "fix"),
    [
        (LoRASettings.resolve(rank=4), "rank 3", "lora_rank: 3, lora_alpha: 6"),
        (LoRASettings.resolve(rank=3, alpha=3), "scale 2", "lora_alpha: 6"),
        (LoRASettings.resolve(rank=3, targets=["q_proj"]), "does not adapt", "lora_target_modules"),
        (LoRASettings.resolve(rank=3, shared_a=True), "an A for each projection", "compat: erniekit"),
    ],
)
def test_settings_that_differ_from_the_adapters_are_refused_with_the_keys_to_set(
    adapter: Adapter, fresh: nn.Module, settings: LoRASettings, said: str, fix: str
) -> None:
    inject(fresh, settings, seed=1)
    with pytest.raises(CheckpointError, match=said) as error:
        load_adapter(fresh, adapter)
    assert fix in error.value.fix


def test_an_adapter_of_fewer_projections_than_the_run_is_refused(adapter: Adapter, fresh: nn.Module) -> None:
    fewer = Adapter({n: u for n, u in adapter.updates.items() if "v_proj" not in n}, 3, 6)
    inject(fresh, SETTINGS, seed=1)
    with pytest.raises(CheckpointError, match="nothing for v_proj") as error:
        load_adapter(fresh, fewer)
    assert "v_proj" not in error.value.fix


def test_the_adapters_settings_make_a_model_that_takes_it(ernie: nn.Module, adapter: Adapter, fresh: nn.Module) -> None:
    inject(fresh, adapter.settings(fresh), seed=1)
    load_adapter(fresh, adapter)
    assert torch.equal(fresh(IDS), ernie(IDS))
    assert all(p.requires_grad for p in lora_state(fresh).values())


@pytest.mark.parametrize("fault", ["no update", "another rank"])
def test_experts_of_a_layer_that_differ_are_refused(moe: nn.Module, paddle: Path, trained, fault: str) -> None:
    adapter = adapter_of(trained(moe, SETTINGS), SETTINGS)
    updates = dict(adapter.updates)
    odd = "model.layers.2.mlp.experts.3.down_proj"
    if fault == "no update":
        updates.pop(odd)
    else:
        updates[odd] = LowRank(updates[odd].A[:2], updates[odd].B[:, :2], updates[odd].scale)
    plain = ModelFolder(paddle / "moe_old").build()
    with pytest.raises(CheckpointError, match=rf"{odd} has {fault}"):
        attach(plain, Adapter(updates, 3, 6))


def test_an_adapter_without_a_runs_experts_is_refused(moe: nn.Module, paddle: Path, trained) -> None:
    adapter = adapter_of(trained(moe, SETTINGS), SETTINGS)
    fewer = Adapter({n: u for n, u in adapter.updates.items() if ".experts." not in n}, 3, 6)
    run = ModelFolder(paddle / "moe_old").build()
    inject(run, SETTINGS, seed=1)
    with pytest.raises(CheckpointError, match=r"nothing for gate_proj in layers\.1\.mlp\.experts\.gate_up"):
        load_adapter(run, fewer)
