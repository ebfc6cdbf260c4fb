"""What transformers makes of a quantised folder: the table of docs/quantize.md, run with the installed version.

Exact kinds give our logits; the others fail, or differ in the way `erniekit quantize` warns of.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bitsandbytes import functional
from transformers import AutoModelForCausalLM

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.data.collate import collate
from erniekit.data.types import Batch, Pack, Sample
from erniekit.demo.tiny import make_tiny_model
from erniekit.quant_schemes import QUANT_RECIPES, QuantRecipe
from erniekit.quantize.fit import fitted
from erniekit.quantize.layer_weights import Method
from erniekit.quantize.readers import readers, warnings
from erniekit.quantize.run import QuantiseJob, quantise
from erniekit.quantize.streams import OneLayer, Streams

IDS = torch.arange(3, 43)


@pytest.fixture(scope="module", params=["ernie4_5", "ernie4_5_moe"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bf16, as real models are."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model") / request.param, family=request.param)
    model = ModelFolder(folder).build(torch.bfloat16)
    write_model(folder, model.config, model.state_dict().__getitem__)
    return folder


def row(tokens: torch.Tensor = IDS) -> Batch:
    ids = tokens.numpy().astype("int32")
    return collate([Pack((Sample(ids, ids),), 0)], pad_multiple=1)


def quantised(source: Path, out: Path, quant: str, group: int | None = None) -> Path:
    recipe = fitted(QUANT_RECIPES[quant], ModelFolder(source).config, group)
    method, device = Method(compensate=False, expert_tokens=8), torch.device("cpu")
    job = QuantiseJob(source, out, quant, recipe, method, device, torch.float32, [row()])
    quantise(job)
    return out


def their_logits(folder: Path, ids: torch.Tensor = IDS) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        model(ids[None])  # compressed-tensors unpacks the weights at the first call
        torch.nn.Module.float(model)  # the weights are what is compared, not how bf16 products round
        return model(ids[None]).logits[0]


def our_logits(folder: Path, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return ModelFolder(folder).build(torch.float32).eval()(ids[None])[0]


def our_rounded_logits(folder: Path, recipe: QuantRecipe, ids: torch.Tensor = IDS) -> torch.Tensor:
    """With activations rounded before the products, as the report's numbers are."""
    one = OneLayer(ModelFolder(folder), torch.device("cpu"), torch.float32)
    parts = {name: one.folder.stored_tensor(name) for name in one.folder._on_disk if name.endswith(".input_scale")}
    streams = Streams(one, [row(ids)], ())
    for number in range(one.folder.config.num_layers):
        entries = {name: entry for name, entry in one.entries.items() if name.startswith(f"layers.{number}.")}
        scales = {
            name.removeprefix(f"layers.{number}."): parts[f"{entry.theirs[0].removesuffix('weight')}input_scale"]
            for name, entry in entries.items()
            if f"{entry.theirs[0].removesuffix('weight')}input_scale" in parts
        }
        streams.advance_quantised(one.open(number), recipe, scales)
    return streams._head()(streams.quantised[0])[0].detach()


def moe(source: Path) -> bool:
    return ModelFolder(source).config.moe is not None


@pytest.mark.parametrize(
    ("quant", "group"),
    [
        ("w4a16", 32),
        pytest.param("w4a16", -1, marks=pytest.mark.full),
        pytest.param("w8a16", None, marks=pytest.mark.full),
        ("w4w8a16", None),
        ("mxfp4", None),
    ],
)
def test_kinds_of_weights_alone_are_exact(source: Path, tmp_path: Path, quant: str, group: int | None) -> None:
    folder = quantised(source, tmp_path / "out", quant, group)
    theirs, ours, plain = their_logits(folder), our_logits(folder), our_logits(source)
    assert (theirs - ours).abs().max() <= 1e-5 * ours.abs().max()
    assert (plain - ours).abs().max() > 1e-3 * ours.abs().max(), "and it is not the plain model that was read"
    assert not warnings(QUANT_RECIPES[quant], moe(source))


@pytest.mark.parametrize("quant", ["w8a8", "fp8_static", "fp8_dynamic"])
def test_kinds_with_activations_round_them_as_our_report_does_but_for_experts(
    source: Path, tmp_path: Path, quant: str
) -> None:
    folder, recipe = quantised(source, tmp_path / "out", quant), QUANT_RECIPES[quant]
    if moe(source) and quant == "w8a8":
        with pytest.raises(RuntimeError, match="conversion of the weights"):
            their_logits(folder)
        assert any(line.startswith("transformers") for line in warnings(recipe, moe=True))
        return
    assert not warnings(recipe, moe(source))
    # Shared experts get tokens without a batch dim there, and compressed-tensors then takes one scale for all of them:
    # one token shows that everything else is the same.
    ids = IDS[5:6] if moe(source) and quant == "fp8_dynamic" else IDS
    theirs = their_logits(folder, ids)
    if moe(source):  # experts in 16 bit: their stored input scales, or their rounding, are dropped
        assert (theirs - our_rounded_logits(folder, recipe, ids)).abs().max() > 1e-3
        recipe = replace(recipe, experts=replace(recipe.experts, inputs=""))
        assert "experts become 16 bit" in readers(QUANT_RECIPES[quant], moe=True)[1].note
    ours = our_rounded_logits(folder, recipe, ids)
    # A value between two fp8 or int8 steps may fall to either side where sums are added in another order.
    assert (theirs - ours).abs().mean() <= 2e-3 * ours.abs().mean()
    assert (theirs - our_logits(folder, ids)).abs().mean() > 5e-3 * ours.abs().mean()


def test_nf4_is_read_with_bitsandbytes_but_not_for_experts(source: Path, tmp_path: Path) -> None:
    folder, recipe = quantised(source, tmp_path / "out", "nf4"), QUANT_RECIPES["nf4"]
    if moe(source):
        with pytest.raises(RuntimeError):
            their_logits(folder)
        assert any(line.startswith("transformers") for line in warnings(recipe, moe=True))
        return
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ours = ModelFolder(folder).build().state_dict()
    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            weight = functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            mine = (
                name.replace("model.", "").replace("self_attn.o_proj", "attn.out").replace("mlp.down_proj", "mlp.down")
            )
            assert torch.equal(weight, ours[f"{mine}.weight"])
    assert not warnings(recipe, moe=False)
