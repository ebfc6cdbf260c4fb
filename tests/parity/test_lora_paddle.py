"""LoRA against ERNIEKit on Paddle: the recorded adapter's logits, gradients, 20-step curve and merged result (fp32)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.lora.adapter import adapter_of, attach, load_adapter
from erniekit.lora.adapter_files import read_adapter, write_adapter
from erniekit.lora.inject import inject, lora_state
from erniekit.lora.merge import fold

TOLERANCE = 1e-4  # the fixtures' README: agreement of two fp32 stacks on logits and losses is about 1e-5


@pytest.fixture(scope="module")
def numbers(paddle: Path) -> dict[str, torch.Tensor]:
    return load_file(str(paddle / "dense.safetensors"))


@pytest.fixture(scope="module")
def recorded(paddle: Path) -> dict[str, Any]:
    return json.loads((paddle / "dense.json").read_text())["lora"]


def base(paddle: Path, name: str = "dense_old") -> nn.Module:
    return ModelFolder(paddle / name).build()


def trainable(paddle: Path, shared_a: bool = True) -> nn.Module:
    """The base with the recorded adapter in place, as `lora_path` puts it there."""
    model = base(paddle)
    adapter = read_adapter(paddle / "dense_lora", model)
    inject(model, adapter.settings(model, shared_a), seed=0)
    load_adapter(model, adapter)
    return model


def mean_loss(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)


@pytest.mark.parametrize("name", ["dense_old", "dense_new"])
@pytest.mark.parametrize("shared_a", [True, False])
def test_recorded_adapter_gives_paddles_logits(
    paddle: Path, numbers: dict[str, torch.Tensor], name: str, shared_a: bool
) -> None:
    model = base(paddle, name)
    attach(model, read_adapter(paddle / "dense_lora", model), shared_a)
    with torch.no_grad():
        logits = model(numbers["input_ids"])
    torch.testing.assert_close(logits, numbers["lora.logits"], atol=TOLERANCE, rtol=0)
    assert (logits - numbers["logits"]).abs().max() > 0.1  # the adapter does something


def test_gradients_of_a_and_b_equal_paddles(
    paddle: Path, numbers: dict[str, torch.Tensor], recorded: dict[str, Any]
) -> None:
    model = trainable(paddle)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == recorded["trainable_parameters"]
    loss = mean_loss(model, numbers["train_ids.0"], numbers["train_labels_shifted.0"])
    assert loss.item() == pytest.approx(recorded["loss0"], abs=TOLERANCE)
    loss.backward()
    places = {"self_attn.qkv_proj": "attn.qkv", "self_attn.o_proj": "attn.out"}
    places |= {"mlp.up_gate_proj": "mlp.gate_up", "mlp.down_proj": "mlp.down"}
    grads = {name: param.grad for name, param in lora_state(model).items()}
    assert len(grads) == len(recorded["grad_norms"])
    for theirs, norm in recorded["grad_norms"].items():
        module, _, side = theirs.removeprefix("model.ernie.").rpartition(".lora_")
        ours = next(module.replace(k, v) for k, v in places.items() if k in module)
        (grad,) = (g for n, g in grads.items() if n.startswith(f"{ours}.lora.") and n.endswith(f".{side}"))
        assert grad.norm().item() == pytest.approx(norm, rel=1e-4), theirs


def test_twenty_lora_steps_follow_paddles_curve_and_merge_to_its_logits(
    paddle: Path, numbers: dict[str, torch.Tensor], recorded: dict[str, Any]
) -> None:
    model = trainable(paddle)
    params = [p for p in model.parameters() if p.requires_grad]
    r = recorded
    optimizer = torch.optim.AdamW(
        params, lr=r["learning_rate"], betas=(r["beta1"], r["beta2"]), eps=r["epsilon"], weight_decay=r["weight_decay"]
    )
    losses, norms = [], []
    for step in range(len(r["loss"])):
        loss = mean_loss(model, numbers[f"train_ids.{step % 4}"], numbers[f"train_labels_shifted.{step % 4}"])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.grad.mul_(r["max_grad_norm"] / max(norm.item(), r["max_grad_norm"]))
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    assert losses == pytest.approx(r["loss"], abs=TOLERANCE)
    assert norms == pytest.approx(r["grad_norm_before_clip"], rel=1e-4)
    with torch.no_grad():
        merged = fold(model)(numbers["input_ids"][:1])
    expected = numbers["lora.logits_after_training_merged"]
    torch.testing.assert_close(merged, expected, atol=TOLERANCE, rtol=0)


def test_recorded_adapter_goes_to_peft_form_and_back_bit_for_bit(paddle: Path, tmp_path: Path) -> None:
    model = trainable(paddle)
    adapter = read_adapter(paddle / "dense_lora", model)
    write_adapter(tmp_path / "peft", adapter_of(model, adapter.settings(model)), model)
    write_adapter(tmp_path / "paddle", read_adapter(tmp_path / "peft", model), model, layout="paddle")
    (file,) = (tmp_path / "paddle").glob("*.safetensors")
    back, original = load_file(str(file)), load_file(str(paddle / "dense_lora" / "adapter_from_pdparams.safetensors"))
    assert back.keys() == original.keys()
    assert all(torch.equal(back[name], original[name]) for name in original)
    written = json.loads((tmp_path / "paddle" / "lora_config.json").read_text())
    source = json.loads((paddle / "dense_lora" / "lora_config.json").read_text())
    for key in ("r", "lora_alpha", "rslora", "scaling"):
        assert written[key] == source[key]
    assert sorted(written["target_modules"]) == sorted(source["target_modules"])
