"""LoRA on a model with experts: against ERNIEKit's recorded run, and in the hands of peft and transformers (fp32)."""

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
from erniekit.export.run import export
from erniekit.lora.adapter import adapter_of, attach, load_adapter
from erniekit.lora.adapter_files import read_adapter, write_adapter
from erniekit.lora.inject import inject, lora_linears, lora_state
from erniekit.lora.merge import fold
from erniekit.lora.settings import LoRASettings

TOLERANCE = 1e-5  # relative to the largest logit (about 10): fp32 sums in another order
PADDLE = 1e-4  # the recording's own advice
pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern:RuntimeWarning")


@pytest.fixture(scope="module")
def numbers(paddle: Path) -> dict[str, torch.Tensor]:
    return load_file(str(paddle / "moe.safetensors"))


@pytest.fixture(scope="module")
def recorded(paddle: Path) -> dict[str, Any]:
    return json.loads((paddle / "moe.json").read_text())["lora"]


@pytest.fixture(scope="module")
def base(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Paddle fixture as transformers can read it: a dense first layer, three with shared and routed experts."""
    return export(paddle / "moe_old", None, tmp_path_factory.mktemp("base") / "hf")


def trainable(paddle: Path) -> nn.Module:
    model = ModelFolder(paddle / "moe_old").build()
    adapter = read_adapter(paddle / "moe_lora", model)
    inject(model, adapter.settings(model, shared_a=True), seed=0)
    load_adapter(model, adapter)
    return model


def mean_loss(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)


# --- recorded from Paddle ---


@pytest.mark.parametrize("shared_a", [True, False])
def test_recorded_adapter_gives_paddles_logits(paddle: Path, numbers: dict[str, torch.Tensor], shared_a: bool) -> None:
    model = ModelFolder(paddle / "moe_new").build()
    attach(model, read_adapter(paddle / "moe_lora", model), shared_a)
    with torch.no_grad():
        logits = model(numbers["input_ids"])
    torch.testing.assert_close(logits, numbers["lora.logits"], atol=PADDLE, rtol=0)
    assert (logits - numbers["logits"]).abs().max() > 0.1  # the adapter does something


def test_gradients_of_every_experts_a_and_b_equal_paddles(
    paddle: Path, numbers: dict[str, torch.Tensor], recorded: dict[str, Any]
) -> None:
    model = trainable(paddle)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == recorded["trainable_parameters"]
    loss = mean_loss(model, numbers["train_ids.0"], numbers["train_labels_shifted.0"])
    assert loss.item() == pytest.approx(recorded["loss0"], abs=PADDLE)
    loss.backward()
    # The gradients go through the adapter's own files: every one comes out under ERNIEKit's name.
    grads = {name: param.grad for name, param in lora_state(model).items()}
    settings = read_adapter(paddle / "moe_lora", model).settings(model, shared_a=True)
    updates = adapter_of(model, settings, grads).updates
    parts = {"self_attn.qkv_proj": ("q", "k", "v"), "up_gate_proj": ("gate", "up")}
    seen = 0
    for theirs, norm in recorded["grad_norms"].items():
        name, _, side = theirs.removeprefix("model.ernie.").rpartition(".lora_")
        fused = next((key for key in parts if name.endswith(key)), None)
        stem = name.rpartition(".")[0]
        publics = [f"model.{stem}.{p}_proj" for p in parts[fused]] if fused else [f"model.{name}"]
        found = [updates[public] for public in publics]
        tensor = found[0].A if side == "A" else torch.cat([u.B for u in found])
        assert tensor.norm().item() == pytest.approx(norm, rel=1e-4, abs=1e-9), theirs
        seen += 1
    assert seen == recorded["trainable_tensors"]


def test_twenty_lora_steps_follow_paddles_curve_and_merge_to_its_logits(
    paddle: Path, numbers: dict[str, torch.Tensor], recorded: dict[str, Any]
) -> None:
    model, r = trainable(paddle), recorded
    params = [p for p in model.parameters() if p.requires_grad]
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
        losses.append(loss.item()), norms.append(norm.item())
    assert losses == pytest.approx(r["loss"], abs=PADDLE)
    assert norms == pytest.approx(r["grad_norm_before_clip"], rel=1e-4)
    with torch.no_grad():
        merged = fold(model)(numbers["input_ids"][:1])
    torch.testing.assert_close(merged, numbers["lora.logits_after_training_merged"], atol=PADDLE, rtol=0)


def test_recorded_adapter_goes_to_peft_form_and_back_bit_for_bit(paddle: Path, tmp_path: Path) -> None:
    model = trainable(paddle)
    adapter = read_adapter(paddle / "moe_lora", model)
    write_adapter(tmp_path / "peft", adapter_of(model, adapter.settings(model)), model)
    write_adapter(tmp_path / "paddle", read_adapter(tmp_path / "peft", model), model, layout="paddle")
    (file,) = (tmp_path / "paddle").glob("*.safetensors")
    back, original = load_file(str(file)), load_file(str(paddle / "moe_lora" / "adapter_from_pdparams.safetensors"))
    assert back.keys() == original.keys()
    assert all(torch.equal(back[name], original[name]) for name in original)
    written, source = (
        json.loads((folder / "lora_config.json").read_text()) for folder in (tmp_path / "paddle", paddle / "moe_lora")
    )
    for key in ("r", "lora_alpha", "rslora", "scaling"):
        assert written[key] == source[key]
    assert sorted(written["target_modules"]) == sorted(source["target_modules"])


# --- peft and transformers ---


def theirs(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def with_peft(base: Path, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(theirs(base), adapter).eval()


def ids_for(seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 512, (2, 12), generator=torch.Generator().manual_seed(seed))


def trained(base: Path, settings: LoRASettings) -> nn.Module:
    model = ModelFolder(base).build()
    inject(model, settings, seed=1)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.5)
    for step in range(3):
        ids = ids_for(step)
        optimizer.zero_grad()
        F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
    return model


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=TOLERANCE * max(1.0, float(want.abs().max())), rtol=0)


SETTINGS = {
    "all": LoRASettings.resolve(rank=3),
    "rslora": LoRASettings.resolve(rank=4, rslora=True),
    "shared_a": LoRASettings.resolve(rank=4, shared_a=True),
    "one_layer": LoRASettings.resolve(rank=4, targets=[r"layers\.2\..*"]),
    "half_of_gate_up": LoRASettings.resolve(rank=4, alpha=3, targets=["gate_proj"]),
    "routed_only": LoRASettings.resolve(rank=4, targets=[r".*\.experts\..*"]),
    "down_and_router": LoRASettings.resolve(rank=4, targets=["q_proj", "down_proj", "gate"]),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_an_adapter_trained_here_gives_the_same_logits_in_peft_and_comes_back_bit_for_bit(
    base: Path, tmp_path: Path, case: str
) -> None:
    settings, before = SETTINGS[case], ModelFolder(base).build()(ids_for())
    model = trained(base, settings)
    write_adapter(tmp_path / "ours", adapter_of(model, settings, base=str(base)), model)
    in_peft = with_peft(base, tmp_path / "ours")
    with torch.no_grad():
        ours = model(ids_for())
        assert_same(in_peft(ids_for()).logits, ours)
    assert (ours - before).abs().max() > 1e-2  # training moved it
    again = ModelFolder(base).build()
    attach(again, read_adapter(tmp_path / "ours", again), settings.shared_a)
    want, got = lora_state(model), lora_state(again)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    # peft saves experts in its own fused form, which is read as well
    in_peft.save_pretrained(tmp_path / "theirs")
    fused = ModelFolder(base).build()
    attach(fused, read_adapter(tmp_path / "theirs", fused))
    with torch.no_grad():
        assert_same(fused(ids_for()), ours)
        write_adapter(tmp_path / "again", read_adapter(tmp_path / "theirs", fused), fused)
        assert_same(with_peft(base, tmp_path / "again")(ids_for()).logits, ours)


def test_default_targets_adapt_what_pefts_leave_out(base: Path) -> None:
    """LoRA with our default targets is on attention, the dense first layer, the shared and the routed experts.

    Today's PEFT is not: without target_modules it refuses ernie4_5_moe, `all-linear` as well as the usual list of seven
    names become the routed experts' fused parameters, and the dense first layer and every shared expert are silently
    left without an adapter (`all-linear` takes the router in, too). Should the assertions on peft fail one day, peft
    has caught up: then let adapter_config.json name modules again (lora/peft_experts.py)."""
    from peft import LoraConfig, get_peft_model

    model = ModelFolder(base).build()
    inject(model, LoRASettings.resolve(rank=4), seed=1)
    adapted = {name for name, _ in lora_linears(model)}
    assert adapted == {
        *(f"layers.{i}.attn.{linear}" for i in range(4) for linear in ("qkv", "out")),
        *(f"layers.0.mlp.{linear}" for linear in ("gate_up", "down")),
        *(f"layers.{i}.mlp.{kind}.{name}" for i in (1, 2, 3) for kind in ("shared", "experts")
          for name in ("gate_up", "down")),
    }  # fmt: skip

    with pytest.raises(ValueError, match="target_modules"):
        get_peft_model(theirs(base), LoraConfig(r=4))
    usual = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    for targets, router in (("all-linear", True), (usual, False)):
        in_peft = get_peft_model(theirs(base), LoraConfig(r=4, target_modules=targets))
        has = [name for name, _ in in_peft.named_parameters() if "lora_A" in name]
        assert any(".mlp.experts." in name for name in has)
        assert not any("layers.0.mlp." in name or "shared_experts" in name for name in has)
        assert any(".mlp.gate." in name for name in has) is router


@pytest.mark.parametrize("layout", ["hf", "hf_fused"])
def test_a_merged_export_gives_transformers_the_logits_of_base_and_adapter(
    base: Path, paddle: Path, tmp_path: Path, layout: str
) -> None:
    settings = LoRASettings.resolve(rank=4)
    model = trained(paddle / "moe_old", settings)
    write_adapter(tmp_path / "adapter", adapter_of(model, settings, base=str(base)), model)
    out = export(paddle / "moe_old", tmp_path / "adapter", tmp_path / "export", layout=layout, max_shard_size=1e-4)
    assert ModelFolder(out).layout == layout
    with torch.no_grad():
        merged = theirs(out)(ids_for()).logits
        assert_same(merged, model(ids_for()))
        assert_same(merged, with_peft(base, tmp_path / "adapter")(ids_for()).logits)
