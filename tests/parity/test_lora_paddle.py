"""LoRA against ERNIEKit on Paddle: recorded adapters, their logits, gradients, curves and merged results (fp32)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.lora.adapter import adapter_of, attach
from erniekit.lora.adapter_files import read_adapter, write_adapter
from erniekit.lora.inject import lora_state
from support.merged import fold
from support.recorded_training import with_adapter

TOLERANCE = 1e-4  # the fixtures' README: agreement of two fp32 stacks on logits and losses is about 1e-5


FAMILIES = ["dense", "moe"]


@cache
def numbers(paddle: Path, family: str) -> dict[str, torch.Tensor]:
    return load_file(str(paddle / f"{family}.safetensors"))


@cache
def recorded(paddle: Path, family: str) -> dict[str, Any]:
    return json.loads((paddle / f"{family}.json").read_text())["lora"]


def mean_loss(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)


@pytest.mark.parametrize("name", ["dense_old", "dense_new", "moe_new"])
@pytest.mark.parametrize("shared_a", [True, False])
def test_recorded_adapter_gives_paddles_logits(paddle: Path, name: str, shared_a: bool) -> None:
    family = name.partition("_")[0]
    known, model = numbers(paddle, family), ModelFolder(paddle / name).build()
    attach(model, read_adapter(paddle / f"{family}_lora", model), shared_a)
    with torch.no_grad():
        logits = model(known["input_ids"])
    torch.testing.assert_close(logits, known["lora.logits"], atol=TOLERANCE, rtol=0)
    assert (logits - known["logits"]).abs().max() > 0.1  # the adapter does something


def adapter_gradients(model: nn.Module, paddle: Path, family: str) -> dict[str, Any]:
    """After the first recorded batch, whose loss and number of trained weights are Paddle's."""
    r, known = recorded(paddle, family), numbers(paddle, family)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == r["trainable_parameters"]
    loss = mean_loss(model, known["train_ids.0"], known["train_labels_shifted.0"])
    assert loss.item() == pytest.approx(r["loss0"], abs=TOLERANCE)
    loss.backward()
    return {name: param.grad for name, param in lora_state(model).items()}


def test_gradients_of_a_and_b_equal_paddles(paddle: Path) -> None:
    model, told = with_adapter(paddle), recorded(paddle, "dense")["grad_norms"]
    grads = adapter_gradients(model, paddle, "dense")
    places = {"self_attn.qkv_proj": "attn.qkv", "self_attn.o_proj": "attn.out"}
    places |= {"mlp.up_gate_proj": "mlp.gate_up", "mlp.down_proj": "mlp.down"}
    assert len(grads) == len(told)
    for theirs, norm in told.items():
        module, _, side = theirs.removeprefix("model.ernie.").rpartition(".lora_")
        ours = next(module.replace(k, v) for k, v in places.items() if k in module)
        (grad,) = (g for n, g in grads.items() if n.startswith(f"{ours}.lora.") and n.endswith(f".{side}"))
        assert grad.norm().item() == pytest.approx(norm, rel=1e-4), theirs


def test_gradients_of_every_experts_a_and_b_equal_paddles(paddle: Path) -> None:
    model, r = with_adapter(paddle, "moe"), recorded(paddle, "moe")
    # The gradients go through the adapter's own files: every one comes out under ERNIEKit's name.
    settings = read_adapter(paddle / "moe_lora", model).settings(model, shared_a=True)
    updates = adapter_of(model, settings, adapter_gradients(model, paddle, "moe")).updates
    parts = {"self_attn.qkv_proj": ("q", "k", "v"), "up_gate_proj": ("gate", "up")}
    seen = 0
    for theirs, norm in r["grad_norms"].items():
        name, _, side = theirs.removeprefix("model.ernie.").rpartition(".lora_")
        fused = next((key for key in parts if name.endswith(key)), None)
        stem = name.rpartition(".")[0]
        publics = [f"model.{stem}.{p}_proj" for p in parts[fused]] if fused else [f"model.{name}"]
        found = [updates[public] for public in publics]
        tensor = found[0].A if side == "A" else torch.cat([u.B for u in found])
        assert tensor.norm().item() == pytest.approx(norm, rel=1e-4, abs=1e-9), theirs
        seen += 1
    assert seen == r["trainable_tensors"]


@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_lora_steps_follow_paddles_curve_and_merge_to_its_logits(paddle: Path, family: str) -> None:
    model, r, known = with_adapter(paddle, family), recorded(paddle, family), numbers(paddle, family)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        params, lr=r["learning_rate"], betas=(r["beta1"], r["beta2"]), eps=r["epsilon"], weight_decay=r["weight_decay"]
    )
    losses, norms = [], []
    for step in range(len(r["loss"])):
        loss = mean_loss(model, known[f"train_ids.{step % 4}"], known[f"train_labels_shifted.{step % 4}"])
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
        merged = fold(model)(known["input_ids"][:1])
    expected = known["lora.logits_after_training_merged"]
    torch.testing.assert_close(merged, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_adapter_goes_to_peft_form_and_back_bit_for_bit(paddle: Path, family: str, tmp_path: Path) -> None:
    model, source = with_adapter(paddle, family), paddle / f"{family}_lora"
    adapter = read_adapter(source, model)
    write_adapter(tmp_path / "peft", adapter_of(model, adapter.settings(model)), model)
    write_adapter(tmp_path / "paddle", read_adapter(tmp_path / "peft", model), model, layout="paddle")
    (file,) = (tmp_path / "paddle").glob("*.safetensors")
    back, original = load_file(str(file)), load_file(str(source / "adapter_from_pdparams.safetensors"))
    assert back.keys() == original.keys()
    assert all(torch.equal(back[name], original[name]) for name in original)
    written = json.loads((tmp_path / "paddle" / "lora_config.json").read_text())
    original_words = json.loads((source / "lora_config.json").read_text())
    for key in ("r", "lora_alpha", "rslora", "scaling"):
        assert written[key] == original_words[key]
    assert sorted(written["target_modules"]) == sorted(original_words["target_modules"])
