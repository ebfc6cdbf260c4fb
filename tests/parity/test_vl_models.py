"""ERNIE-4.5-VL against numbers recorded from ERNIEKit on Paddle: logits, losses, gradients, curves, router losses,
adapters, and its weights through every layout and back. float32 throughout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.data.types import Batch
from erniekit.export.run import export
from erniekit.lora.adapter import adapter_of, load_adapter
from erniekit.lora.adapter_files import read_adapter, write_adapter
from erniekit.lora.inject import inject
from erniekit.lora.projections import projections
from erniekit.losses.causal import causal_loss
from erniekit.losses.moe_balance import RouterLosses, RouterLossWeights
from erniekit.models.layers.modal import OF_VISION
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.schedule import Schedule
from erniekit.train.step import TrainStep
from support.merged import fold
from support.recorded_training import gradients, norms, on_one_rank
from support.recorded_vision import (
    FOLDER,
    layer_norms_as_in_paddle_on_a_cpu,
    logits_of,
    numbers,
    recorded_batch,
    tensors,
)

# The recording's own advice: fp32 on another BLAS.
LOGITS = {"atol": 2e-4, "rtol": 0.0}
LOSS = NORM = 1e-4
CURVE, ROUTER_CURVE = 5e-4, 2e-3
TERM = 1e-5
CASES = tuple(numbers()["cases"])
WITH_LOGITS = tuple(case for case in CASES if f"{case}.logits" in tensors())


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return ModelFolder(FOLDER / "vl_old").build()


def mean_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return causal_loss(model, batch) / batch.num_label_tokens


@pytest.mark.parametrize("case", WITH_LOGITS)
def test_logits_equal_the_recorded_ones(model: nn.Module, case: str) -> None:
    torch.testing.assert_close(logits_of(model, recorded_batch(case)), tensors()[f"{case}.logits"], **LOGITS)


def test_the_tower_and_the_resampler_answer_as_recorded(model: Any) -> None:
    batch, vision = recorded_batch("image_and_video"), recorded_batch("image_and_video").vision
    assert batch.vision is not None
    grids = [tuple(grid) for grid in vision.grids.tolist()]
    with torch.no_grad():
        seen = model.tower(vision.patches, grids)
        torch.testing.assert_close(seen, tensors()["image_and_video.vit"], atol=2e-5, rtol=0)
        torch.testing.assert_close(
            model.pictures.encode_here(vision), tensors()["image_and_video.resampler"], atol=2e-5, rtol=0
        )


@pytest.mark.parametrize("chunk", [1, 40, 100])
def test_a_tower_in_chunks_of_frames_answers_the_same(model: Any, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    vision = recorded_batch("image_and_video").vision
    with torch.no_grad():
        whole = model.pictures.encode_here(vision)
        monkeypatch.setattr("erniekit.models.layers.vision.VisionTower.chunk", chunk)
        torch.testing.assert_close(model.pictures.encode_here(vision), whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_every_gradient_norm_equal_the_recorded_ones(model: nn.Module, case: str) -> None:
    recorded, folder = numbers()["cases"][case], ModelFolder(FOLDER / "vl_old")
    model.zero_grad()
    loss = mean_loss(model, recorded_batch(case))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(recorded["loss"], abs=LOSS)
    got = norms(folder.spec.names(folder.config, "hf"), gradients(model))
    assert got.keys() == recorded["grad_norms"].keys(), "a weight that saw nothing has a gradient of zeros"
    smallest = 1e-6 * max(recorded["grad_norms"].values())
    for name, norm in recorded["grad_norms"].items():
        assert got[name] == pytest.approx(norm, rel=NORM, abs=smallest), name


def test_whole_gradients_equal_the_recorded_ones(model: nn.Module) -> None:
    folder = ModelFolder(FOLDER / "vl_old")
    model.zero_grad()
    mean_loss(model, recorded_batch("image_and_video")).backward()
    grads, prefix, seen = gradients(model), "image_and_video.grad.", 0
    for entry in folder.entries():
        for name, grad in zip(entry.theirs, entry.write(grads[entry.ours]) if entry.ours in grads else ()):
            if prefix + name in tensors() and not entry.copy_of:
                torch.testing.assert_close(grad, tensors()[prefix + name], atol=1e-4, rtol=1e-4)
                seen += 1
    assert seen == sum(name.startswith(prefix) for name in tensors())


# --- training ---


def train(model: nn.Module, run: dict[str, Any]) -> tuple[list[float], list[float]]:
    how = run["hyper_parameters"]
    groups = make_groups(model.named_parameters(), 4, how["weight_decay"])
    optimizer = AdamW(groups, (how["beta1"], how["beta2"]), how["epsilon"])
    step = TrainStep(
        on_one_rank(model), optimizer, Schedule("constant", how["learning_rate"], how["steps"]), how["max_grad_norm"]
    )
    batches = [recorded_batch(name) for name in run["batches"]]
    results = [step([batches[k % len(batches)]], k + 1) for k in range(how["steps"])]
    return [r.loss for r in results], [r.grad_norm for r in results]


@pytest.mark.parametrize("name", ["full", pytest.param("freeze_vision", marks=pytest.mark.full)])
def test_recorded_20_step_curves_are_reproduced(name: str) -> None:
    recorded, folder = numbers()["curves"][name], ModelFolder(FOLDER / "vl_old")
    model: Any = folder.build()
    model.tower.requires_grad_(name == "full")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses, grad_norms = train(model, recorded)
    assert losses == pytest.approx(recorded["loss"], abs=CURVE)
    assert grad_norms == pytest.approx(recorded["grad_norm_before_clip"], rel=2e-3)
    after = logits_of(model, recorded_batch("image_and_video"))
    torch.testing.assert_close(after, tensors()[f"curve.{name}.logits_after"], atol=5e-3, rtol=0)
    changes = {n: p.detach() - before[n] for n, p in model.named_parameters()}
    moved = norms(folder.spec.names(folder.config, "hf"), changes)
    for tensor, change in recorded["parameter_change"].items():
        assert moved[tensor] == pytest.approx(change, rel=1e-2, abs=1e-7), tensor


def with_router_losses(model: Any) -> Any:
    """As recorded: a mean over all of a micro-batch's tokens of a modality, with a weight of its own."""
    lambdas = numbers()["router"]["lambdas"]
    for layer in model.layers:
        for k, bank in enumerate(layer.mlp.banks() if layer.sparse else ()):
            weights = RouterLossWeights(*(lambdas[f"moe_{t}_loss_lambda"][k] for t in ("aux", "z", "orthogonal")))
            bank.balance = RouterLosses(weights, torch.ones(()), whole_batch=True, modal=True)
    model.records = []
    return model


@pytest.mark.parametrize("case", numbers()["router"]["cases"])
def test_router_losses_of_each_layer_and_modality_are_the_recorded_ones(case: str) -> None:
    recorded, folder = numbers()["router"]["cases"][case], ModelFolder(FOLDER / "vl_old")
    model = with_router_losses(folder.build())
    loss = mean_loss(model, recorded_batch(case))
    assert float(loss.detach()) == pytest.approx(recorded["reported_loss"], abs=LOSS), "router losses are never told"
    (record,) = model.records
    for term in recorded["terms"]:
        end = OF_VISION if term["modality"] == "vision" else ""
        for told, name in (("router_aux", "aux"), ("router_z", "z"), ("router_ortho", "orthogonal")):
            value, _ = record[told + end, term["layer"]]
            assert float(value) == pytest.approx(term[name], rel=TERM, abs=TERM), (told, term["layer"])
    loss.backward()
    got = norms(folder.spec.names(folder.config, "hf"), gradients(model))
    for name, norm in recorded["grad_norms"].items():
        assert got[name] == pytest.approx(norm, rel=NORM, abs=1e-6), name


@pytest.mark.full
def test_the_recorded_curve_with_router_losses_is_reproduced() -> None:
    recorded = numbers()["router"]["curve"]
    losses, _ = train(with_router_losses(ModelFolder(FOLDER / "vl_old").build()), recorded)
    assert losses == pytest.approx(recorded["loss"], abs=ROUTER_CURVE)
    without = numbers()["curves"]["full"]["loss"]
    assert max(abs(a - b) for a, b in zip(losses, without)) > 10 * ROUTER_CURVE


def test_each_banks_loads_count_its_own_tokens_alone() -> None:
    model = with_router_losses(ModelFolder(FOLDER / "vl_old").build())
    batch = recorded_batch("one_image")
    assert batch.modality is not None
    mean_loss(model, batch)
    seen = int((batch.modality != 0).sum())
    (record,) = model.records
    for layer in (1, 2, 3):
        assert record["usage", layer].sum(1).tolist() == [2 * (50 - seen), 2 * seen], "two choices a token"
        ids, weights = (tensors()[f"one_image.router.{layer}.{what}"] for what in ("topk_ids", "weights"))
        chosen = torch.bincount(ids.flatten().long(), minlength=16).view(2, 8)
        assert record["usage", layer].tolist() == chosen.tolist()
        assert weights.sum(-1).allclose(torch.ones(50))


# --- adapters ---


def adapted() -> Any:
    model = ModelFolder(FOLDER / "vl_old").build()
    adapter = read_adapter(FOLDER / "vl_lora", model)
    inject(model, adapter.settings(model, shared_a=True), seed=0)
    load_adapter(model, adapter)
    return model


def test_a_recorded_adapter_answers_as_recorded_and_so_does_the_merged_model() -> None:
    model, batch = adapted(), recorded_batch("image_and_video")
    torch.testing.assert_close(logits_of(model, batch), tensors()["lora.logits"], **LOGITS)
    losses = [float(mean_loss(model, recorded_batch("one_image")).detach())]
    assert losses == pytest.approx(numbers()["lora"]["curve"]["loss"][:1], abs=LOSS)
    torch.testing.assert_close(logits_of(fold(model), batch), tensors()["lora.logits"], **LOGITS)


def test_adapters_gradients_are_those_of_the_merged_weights() -> None:
    """dB = s dW A^T and dA = s B^T dW: what the recorded gradients of whole weights imply, for every adapter."""
    model, batch, folder = adapted(), recorded_batch("image_and_video"), ModelFolder(FOLDER / "vl_old")
    settings = read_adapter(FOLDER / "vl_lora", model).settings(model)
    mean_loss(model, batch).backward()
    values = adapter_of(model, settings).updates
    grads = adapter_of(model, settings, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}).updates
    fused = {p.public: (p.module, p.expert) for p in projections(model)}
    merged = fold(model)
    merged.requires_grad_(True)
    mean_loss(merged, batch).backward()
    whole = {n: p.grad for n, p in merged.named_parameters()}
    weights = {
        name.removesuffix(".weight"): grad
        for entry in folder.spec.names(folder.config, "hf")
        for name, grad in zip(entry.theirs, entry.write(whole[entry.ours]))
    }
    for public, got in grads.items():
        value, scale = values[public], settings.scaling
        torch.testing.assert_close(got.B, scale * weights[public] @ value.A.t(), atol=2e-5, rtol=1e-4)
        sharing = [other for other in values if fused[other] == fused[public]]  # Paddle has one A for these
        wanted = sum(scale * values[other].B.t() @ weights[other] for other in sharing)
        torch.testing.assert_close(got.A, wanted, atol=2e-5, rtol=1e-4)


def test_the_recorded_lora_curve_is_reproduced(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = numbers()["lora"]["curve"]
    layer_norms_as_in_paddle_on_a_cpu(monkeypatch)
    model = adapted()
    losses, grad_norms = train(model, recorded)
    assert losses == pytest.approx(recorded["loss"], abs=CURVE)
    assert grad_norms == pytest.approx(recorded["grad_norm_before_clip"], rel=2e-3)
    after = logits_of(model, recorded_batch("image_and_video"))
    torch.testing.assert_close(after, tensors()["lora.logits_after"], atol=5e-3, rtol=0)


def test_adapters_go_where_erniekit_puts_them_and_come_back_from_both_formats(tmp_path: Path) -> None:
    model, batch = adapted(), recorded_batch("image_and_video")
    names = {n.partition(".lora.")[0] for n, p in model.named_parameters() if p.requires_grad}
    assert {n for n in names if n.startswith("resampler.")} == {
        f"resampler.{stage}.{part}" for stage in ("spatial", "temporal") for part in ("fc1", "fc2")
    }
    assert not any(n.startswith("tower.") or ".router" in n for n in names)
    assert {f"layers.2.mlp.{bank}.experts.down" for bank in ("text", "vision")} <= names
    before = logits_of(model, batch)
    settings = read_adapter(FOLDER / "vl_lora", model).settings(model)
    for form in ("paddle", "hf"):
        write_adapter(tmp_path / form, adapter_of(model, settings), model, form)
        again = ModelFolder(FOLDER / "vl_old").build()
        read = read_adapter(tmp_path / form, again)
        inject(again, read.settings(again, shared_a=True), seed=1)
        load_adapter(again, read)
        assert torch.equal(logits_of(again, batch), before), form


def test_a_merged_model_answers_as_base_and_adapter_did(tmp_path: Path) -> None:
    out = export(FOLDER / "vl_old", FOLDER / "vl_lora", tmp_path / "merged", layout="hf")
    merged = ModelFolder(out).build()
    torch.testing.assert_close(logits_of(merged, recorded_batch("image_and_video")), tensors()["lora.logits"], **LOGITS)


# --- layouts ---


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {k: t for file in folder.glob("model*.safetensors") for k, t in load_file(file).items()}


def test_weights_and_config_go_through_every_layout_and_back(tmp_path: Path) -> None:
    start = FOLDER / "vl_hf"
    folder, batch = start, recorded_batch("image_and_video")
    expected = logits_of(ModelFolder(start).build(), batch)
    for layout in ("hf", "hf_transformers", "hf_fused", "paddle", "hf"):
        folder = export(folder, None, tmp_path / f"{layout}_{folder.name}", layout=layout)
        opened = ModelFolder(folder)
        assert opened.layout == layout
        assert replace(opened.config, raw_layout="") == replace(ModelFolder(start).config, raw_layout="")
        config = json.loads((folder / "config.json").read_text())
        assert ("text_config" in config) == (layout in ("hf_transformers", "hf_fused"))
        assert torch.equal(logits_of(opened.build(), batch), expected)
    left, right = stored(start), stored(folder)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[k], right[k]) for k in left)


def test_paddles_two_layouts_hold_the_same_weights(tmp_path: Path) -> None:
    out = export(FOLDER / "vl_hf", None, tmp_path / "paddle", layout="paddle")
    left, right = stored(FOLDER / "vl_old"), stored(out)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[k], right[k]) for k in left)
