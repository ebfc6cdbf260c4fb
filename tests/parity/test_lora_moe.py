"""LoRA on a model with experts in the hands of peft and transformers (fp32); Paddle's is in test_lora_paddle.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.export.run import export
from erniekit.lora.adapter import adapter_of, attach
from erniekit.lora.adapter_files import read_adapter, write_adapter
from erniekit.lora.inject import inject, lora_linears, lora_state
from erniekit.lora.settings import LoRASettings

TOLERANCE = 1e-5  # relative to the largest logit (about 10): fp32 sums in another order
pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern:RuntimeWarning")


@pytest.fixture(scope="module")
def base(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Paddle fixture as transformers can read it: a dense first layer, three with shared and routed experts."""
    return export(paddle / "moe_old", None, tmp_path_factory.mktemp("base") / "hf")


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
OFTEN = ("all", "shared_a", "down_and_router")


@pytest.mark.parametrize("case", [c if c in OFTEN else pytest.param(c, marks=pytest.mark.full) for c in SETTINGS])
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
