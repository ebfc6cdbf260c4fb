"""Adapters through files and back: bit-exact for every layout, kind of A and choice of targets; the rest refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.errors import CheckpointError
from erniekit.lora.adapter import adapter_of, attach, load_adapter
from erniekit.lora.adapter_files import is_adapter, read_adapter, write_adapter
from erniekit.lora.inject import base_state, inject, lora_state
from erniekit.lora.settings import LoRASettings

IDS = torch.arange(20).view(2, 10)
CASES = {
    "all": {},
    "rslora": {"rslora": True},
    "shared": {"shared_a": True},
    "some": {"targets": ["q_proj", "v_proj", "down_proj"]},
    "some_shared": {"targets": ["q_proj", "v_proj"], "shared_a": True},
    "one_layer": {"targets": [r"layers\.1\..*"]},
}


def rebuilt(model: nn.Module) -> nn.Module:
    """The same architecture; adapters are compared, so the base's numbers do not matter."""
    return type(model)(model.config)


@pytest.mark.parametrize("family", ["ernie", "llama", "moe"])
@pytest.mark.parametrize("layout", ["hf", "paddle"])
@pytest.mark.parametrize("case", CASES)
def test_adapters_survive_their_files_bit_for_bit(
    request: pytest.FixtureRequest, trained, tmp_path: Path, family: str, layout: str, case: str
) -> None:
    settings = LoRASettings.resolve(rank=3, **CASES[case])
    model = trained(request.getfixturevalue(family), settings)
    write_adapter(tmp_path, adapter_of(model, settings), model, layout)
    assert is_adapter(tmp_path)
    again = rebuilt(model)
    read = read_adapter(tmp_path, again)
    inject(again, read.settings(again, settings.shared_a), seed=99)
    load_adapter(again, read)
    want, got = lora_state(model), lora_state(again)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert read.settings(again).scaling == pytest.approx(settings.scaling)


@pytest.mark.parametrize("family", ["ernie", "llama", "moe"])
@pytest.mark.parametrize("case", ["all", "rslora", "some"])
def test_paddles_own_reading_of_a_stacked_adapter_is_the_same_function(
    request: pytest.FixtureRequest, trained, tmp_path: Path, family: str, case: str
) -> None:
    """Without our note in lora_config.json, as ERNIEKit sees it: one fused A of a higher rank, scale kept by alpha."""
    settings = LoRASettings.resolve(rank=3, **CASES[case])
    model = trained(request.getfixturevalue(family), settings)
    write_adapter(tmp_path, adapter_of(model, settings), model, "paddle")
    config = json.loads((tmp_path / "lora_config.json").read_text())
    del config["erniekit"]
    (tmp_path / "lora_config.json").write_text(json.dumps(config))
    fused = max((t.shape[1] for n, t in paddle_tensors(tmp_path).items() if n.endswith("lora_A")))
    assert config["r"] == fused == (6 if case == "some" else 9)
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config["rslora"] else config["r"])
    assert scale == pytest.approx(settings.scaling)
    want = model(IDS)
    plain = rebuilt(model)
    plain.load_state_dict(base_state(model))
    attach(plain, read_adapter(tmp_path, plain))
    # zero blocks add nothing; only the order of fp32 sums differs
    torch.testing.assert_close(plain(IDS), want, atol=1e-5, rtol=0)


def paddle_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(str(folder / "peft_model-00001-of-00001.safetensors"))


def test_a_shared_a_is_one_fused_matrix_for_paddle_and_a_copy_each_for_peft(
    ernie: nn.Module, trained, tmp_path: Path
) -> None:
    settings = LoRASettings.resolve(rank=3, shared_a=True)
    adapter = adapter_of(trained(ernie, settings), settings)
    write_adapter(tmp_path / "paddle", adapter, ernie, "paddle")
    write_adapter(tmp_path / "peft", adapter, ernie)
    fused = paddle_tensors(tmp_path / "paddle")["ernie.layers.0.self_attn.qkv_proj.lora_A"]
    peft = load_file(str(tmp_path / "peft" / "adapter_model.safetensors"))
    assert fused.shape == (64, 3)
    for part in "qkv":
        one = peft[f"base_model.model.model.layers.0.self_attn.{part}_proj.lora_A.weight"]
        assert torch.equal(one, fused.t())


@pytest.mark.parametrize("upright", [False, True])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_paddle_adapters_with_separate_names_are_read(
    ernie: nn.Module, trained, tmp_path: Path, upright: bool, prefix: str
) -> None:
    """PaddleFormers on transformers-layout weights: q_proj, k_proj, ... by name, in Paddle's or torch's orientation."""
    settings = LoRASettings.resolve(rank=3)
    adapter = adapter_of(trained(ernie, settings), settings)
    tensors = {}
    for name, update in adapter.updates.items():
        for side, t in (("A", update.A), ("B", update.B)):
            tensors[f"{prefix}{name}.lora_{side}"] = (t if upright else t.t()).contiguous().clone()
    save_file(tensors, str(tmp_path / "peft_model-00001-of-00001.safetensors"))
    (tmp_path / "lora_config.json").write_text(json.dumps({"r": 3, "lora_alpha": 6, "rslora": False}))
    read = read_adapter(tmp_path, ernie)
    assert read.updates.keys() == adapter.updates.keys()
    for name, update in adapter.updates.items():
        assert torch.equal(read.updates[name].A, update.A)
        assert torch.equal(read.updates[name].B, update.B)
        assert read.updates[name].scale == update.scale


def test_fused_names_may_carry_the_wrappers_prefix(paddle: Path, ernie: nn.Module, tmp_path: Path) -> None:
    stored = load_file(str(paddle / "dense_lora" / "adapter_from_pdparams.safetensors"))
    save_file({f"model.{n}": t for n, t in stored.items()}, str(tmp_path / "peft_model-00001-of-00001.safetensors"))
    (tmp_path / "lora_config.json").write_bytes((paddle / "dense_lora" / "lora_config.json").read_bytes())
    want, got = read_adapter(paddle / "dense_lora", ernie).updates, read_adapter(tmp_path, ernie).updates
    assert all(torch.equal(want[n].A, got[n].A) and torch.equal(want[n].B, got[n].B) for n in want)


def peft_folder(model: nn.Module, trained, folder: Path, **changes: object) -> Path:
    settings = LoRASettings.resolve(rank=3)
    write_adapter(folder, adapter_of(trained(model, settings), settings), model)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"r": 0}, "positive integer"),
        ({"lora_alpha": "many"}, "positive number"),
    ],
)
def test_peft_adapters_that_compute_something_else_are_refused(
    ernie: nn.Module, trained, tmp_path: Path, change: dict, said: str
) -> None:
    folder = peft_folder(ernie, trained, tmp_path, **change)
    with pytest.raises(CheckpointError, match=said):
        read_adapter(folder, ernie)


@pytest.mark.parametrize("layout", ["hf", "paddle"])
def test_an_adapted_router_survives_its_files(moe: nn.Module, trained, tmp_path: Path, layout: str) -> None:
    settings = LoRASettings.resolve(rank=3, targets=["q_proj", "gate"])
    model = trained(moe, settings)
    write_adapter(tmp_path, adapter_of(model, settings), model, layout)
    again = rebuilt(model)
    read = read_adapter(tmp_path, again)
    attach(again, read)
    want, got = lora_state(model), lora_state(again)
    assert sum(".router.lora.gate." in name for name in want) == 6
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)


def test_peft_is_told_of_parameters_where_there_are_experts(moe: nn.Module, trained, tmp_path: Path) -> None:
    """Names of modules would become the routed experts' fused parameters, and the other MLPs would have no adapter."""
    settings = LoRASettings.resolve(rank=3)
    write_adapter(tmp_path, adapter_of(trained(moe, settings), settings), moe)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    linears = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    assert sorted(config["target_parameters"]) == sorted([*linears, "experts.gate_up_proj", "experts.down_proj"])
    # gate and up are stacked there: twice the rank, the same scale
    assert config["rank_pattern"] == {r"experts\.gate_up_proj": 6}
    assert config["alpha_pattern"] == {r"experts\.gate_up_proj": 12}
    stored = load_file(str(tmp_path / "adapter_model.safetensors"))
    assert stored["base_model.model.model.layers.2.mlp.experts.5.up_proj.lora_B.weight"].shape == (24, 3)


def test_parts_peft_cannot_leave_out_are_written_as_zeros_and_read_as_nothing(
    moe: nn.Module, trained, tmp_path: Path
) -> None:
    settings = LoRASettings.resolve(rank=3, targets=["up_proj"])
    adapter = adapter_of(trained(moe, settings), settings)
    write_adapter(tmp_path, adapter, moe)
    stored = load_file(str(tmp_path / "adapter_model.safetensors"))
    for part in ("gate_proj", "down_proj"):
        for side in "AB":
            assert not stored[f"base_model.model.model.layers.1.mlp.experts.0.{part}.lora_{side}.weight"].any()
    assert read_adapter(tmp_path, moe).updates.keys() == adapter.updates.keys()


def test_a_pickled_adapter_is_refused_with_the_reason(paddle: Path, ernie: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "lora_config.json").write_bytes((paddle / "dense_lora" / "lora_config.json").read_bytes())
    (tmp_path / "lora_model_state.pdparams").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"lora_model_state\.pdparams, a pickle") as error:
        read_adapter(tmp_path, ernie)
    assert "safetensors" in error.value.fix


def test_a_folder_without_an_adapter_says_what_to_point_at(ernie: nn.Module, tmp_path: Path) -> None:
    assert not is_adapter(tmp_path)
    for folder, what in ((tmp_path, "no adapter here"), (tmp_path / "absent", "no such folder")):
        with pytest.raises(CheckpointError, match=what) as error:
            read_adapter(folder, ernie)
        assert "adapter_config.json" in error.value.fix


def test_an_incomplete_adapter_is_refused(ernie: nn.Module, trained, tmp_path: Path) -> None:
    folder = peft_folder(ernie, trained, tmp_path)
    tensors = load_file(str(folder / "adapter_model.safetensors"))
    tensors.pop("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight")
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    with pytest.raises(CheckpointError, match="only one of lora_A and lora_B"):
        read_adapter(folder, ernie)


def test_a_shard_missing_from_a_paddle_adapter_is_named(ernie: nn.Module, trained, tmp_path: Path) -> None:
    settings = LoRASettings.resolve(rank=3)
    write_adapter(tmp_path, adapter_of(trained(ernie, settings), settings), ernie, "paddle")
    (tmp_path / "peft_model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="peft_model-00001-of-00001"):
        read_adapter(tmp_path, ernie)


def test_another_models_adapter_is_refused(paddle: Path, llama: nn.Module, ernie: nn.Module) -> None:
    with pytest.raises(CheckpointError, match="not in this model") as error:
        read_adapter(paddle / "dense_lora", llama)
    assert "another base model" in error.value.fix


def test_a_wrong_shape_is_refused_with_both_shapes(paddle: Path, ernie: nn.Module, trained, tmp_path: Path) -> None:
    folder = peft_folder(ernie, trained, tmp_path)
    raw = json.loads((paddle / "dense_old" / "config.json").read_text())
    source = ModelFolder(paddle / "dense_old")
    other = source.spec.read_config({**raw, "intermediate_size": 48}, "paddle", True, "")
    with pytest.raises(CheckpointError, match=r"\(64, 3\) x \(3, 64\); this model needs \(48, 3\) x \(3, 64\)"):
        read_adapter(folder, source.spec.build(other))
